"""``moe.experts=triton``: gather, two products and the activation without a permuted copy.

Kept for the backward beside the arguments: gate and up before the activation, [R, 2I]. Shapes as in
``automoe.moe.experts``. The kernels have compiled for Hopper and run in Triton's
interpreter; they have not run on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from automoe.errors import BackendError
from automoe.moe.activation import SWIGLU, Activation, ClampedSwiGLU
from automoe.moe.grouped_mm import of_each_row, sum_by_expert
from automoe.moe.kernels import products
from automoe.moe.kernels.tiles import RowTiles, row_tiles, tile_height

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Blocks:
    """Sizes of a product's block and how it is pipelined: columns, summed elements, warps, stages."""

    columns: int
    summed: int
    num_warps: int
    num_stages: int


_INTERPRETED = triton.knobs.runtime.interpret
# Two accumulators of 128 x 128 (gate and up) fill the registers that 128 x 256 does with one.
_UP = _Blocks(16, 16, 4, 1) if _INTERPRETED else _Blocks(128, 64, 8, 4)
# The backward's epilogue holds gate, up and four results beside the accumulator: wider blocks spill.
_BACK = _Blocks(16, 16, 4, 1) if _INTERPRETED else _Blocks(64, 64, 8, 4)
_ONE = _Blocks(16, 16, 4, 1) if _INTERPRETED else _Blocks(256, 64, 8, 4)
_WEIGHT = _Blocks(16, 16, 4, 1) if _INTERPRETED else _Blocks(128, 64, 8, 4)
_SUM_COLUMNS = 1024


def triton_experts(
    x: torch.Tensor,
    gather_idx: torch.Tensor,
    offsets: torch.Tensor,
    probs: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    """Arguments and result as ``automoe.moe.experts`` says; bfloat16, float16 and float32, on CUDA.

    Rows past the last offset are not computed: their output is whatever memory held, and so is what they
    add to the gradient of probs; they add nothing to the gradient of x.

    Raises:
        BackendError: tensors on the CPU, or of another dtype.
    """
    if x.dtype not in _DTYPES:
        raise BackendError(
            f"moe.experts=triton computes in bfloat16, float16 and float32, and the rows are {x.dtype}. "
            "moe.experts=loop takes any dtype"
        )
    if x.device.type != "cuda" and not _INTERPRETED:
        raise BackendError(
            f"moe.experts=triton needs a CUDA device, and the model is on {x.device}. Choose "
            "moe.experts=grouped_mm, or set TRITON_INTERPRET=1 to try the kernels out, very slowly"
        )
    return _TritonExperts.apply(
        x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, activation
    )


class _TritonExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, activation):
        (num_rows,), (num_experts, _, width, hidden) = gather_idx.shape, w_gate_up.shape
        x, w_gate_up, w_down = x.contiguous(), w_gate_up.contiguous(), w_down.contiguous()
        offsets, ctx.activation = offsets.int(), activation
        pre, act = x.new_empty(num_rows, 2 * width), x.new_empty(num_rows, width)
        out = x.new_empty(num_rows, hidden)
        ctx.save_for_backward(x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, pre)
        if num_rows == 0:  # a grid without programs is an error; autograd still comes by
            return out
        tiles = row_tiles(offsets, num_rows, _height(num_rows, num_experts))
        _launch(
            products.gather_up_activate, tiles, width, _UP,
            x, gather_idx, w_gate_up, _or(b_gate_up, w_gate_up), probs, pre, act,
            sizes=(hidden, width, *_constants(activation)), dtype=x.dtype,
            BIASED=b_gate_up is not None, CLAMPED=_clamped(activation),
        )  # fmt: skip
        _launch(
            products.rows_times_weights, tiles, hidden, _ONE,
            act, w_down, _or(b_down, w_down), probs, out,
            sizes=(width, hidden, 1, width), dtype=x.dtype, BIASED=b_down is not None,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, pre = ctx.saved_tensors
        (num_rows, hidden), (num_experts, _, width, _) = grad_out.shape, w_gate_up.shape
        if num_rows == 0:  # zeros and not None: all ranks must reduce the same gradients
            trained = (x, probs, w_gate_up, w_down, b_gate_up, b_down)
            zeros = [None if tensor is None else torch.zeros_like(tensor) for tensor in trained]
            return zeros[0], None, None, *zeros[1:], None
        grad_out = grad_out.contiguous()
        tiles = row_tiles(offsets, num_rows, _height(num_rows, num_experts))
        activation = ctx.activation

        grad_pre, act = torch.empty_like(pre), x.new_empty(num_rows, width)
        shares = probs.new_empty(num_rows, triton.cdiv(width, _BACK.columns), dtype=torch.float32)
        _launch(
            products.grad_down_activate, tiles, width, _BACK,
            grad_out, w_down, probs, pre, grad_pre, act, shares,
            sizes=(hidden, width, *_constants(activation)), dtype=x.dtype, CLAMPED=_clamped(activation),
        )  # fmt: skip
        grad_probs = shares.sum(1)
        grad_w_down = _grad_weights(grad_out, act, None, offsets, torch.empty_like(w_down))
        grad_w_gate_up = _grad_weights(grad_pre, x, gather_idx, offsets, torch.empty_like(w_gate_up))
        grad_b_gate_up = grad_b_down = None
        if b_gate_up is not None:
            grad_b_gate_up = sum_by_expert(grad_pre, offsets).view_as(b_gate_up)
        if b_down is not None:
            grad_b_down = sum_by_expert(grad_out * probs.unsqueeze(1).to(x.dtype), offsets)
            grad_probs += (grad_out * of_each_row(b_down, offsets, num_rows)).sum(-1, dtype=torch.float32)

        grad_rows = x.new_empty(num_rows, hidden)
        _launch(
            products.rows_times_weights, tiles, hidden, _ONE,
            grad_pre, w_gate_up, w_gate_up, probs, grad_rows,
            sizes=(2 * width, hidden, hidden, 1), dtype=x.dtype, BIASED=False,
        )  # fmt: skip
        grad_x = _sum_of_tokens(grad_rows, gather_idx, offsets, x)
        return (
            grad_x, None, None, grad_probs.to(probs.dtype), grad_w_gate_up, grad_w_down,
            grad_b_gate_up, grad_b_down, None,
        )  # fmt: skip


def _launch(
    kernel: Any, tiles: RowTiles, num_columns: int, blocks: _Blocks, *tensors: torch.Tensor,
    sizes: tuple[float, ...], dtype: torch.dtype, **flags: bool,
) -> None:  # fmt: skip
    """One program for each tile of rows and block of columns."""
    kernel[(tiles.slots * triton.cdiv(num_columns, blocks.columns),)](
        *tensors,
        tiles.expert,
        tiles.first_row,
        tiles.offsets,
        tiles.slots,
        tiles.offsets.numel(),
        *sizes,
        **flags,
        PRECISION=_precision(dtype),
        BLOCK_M=tiles.height,
        BLOCK_N=blocks.columns,
        BLOCK_K=blocks.summed,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def _grad_weights(
    left: torch.Tensor,
    right: torch.Tensor,
    gather_idx: torch.Tensor | None,
    offsets: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """``out`` [E, ..., N] with each expert's left.T @ right."""
    m, n = left.shape[1], right.shape[1]
    grid = offsets.numel() * triton.cdiv(m, _WEIGHT.columns) * triton.cdiv(n, _WEIGHT.columns)
    products.grad_weights[(grid,)](
        left,
        right,
        offsets if gather_idx is None else gather_idx,
        out,
        offsets,
        m,
        n,
        GATHERED=gather_idx is not None,
        PRECISION=_precision(left.dtype),
        BLOCK_M=_WEIGHT.columns,
        BLOCK_N=_WEIGHT.columns,
        BLOCK_R=_WEIGHT.summed,
        num_warps=_WEIGHT.num_warps,
        num_stages=_WEIGHT.num_stages,
    )
    return out


def _sum_of_tokens(
    rows: torch.Tensor, gather_idx: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """[R, H] gradients of gathered rows -> [N, H] of what they were read from."""
    num_tokens, hidden = x.shape
    # Rows past the last offset were never computed: they belong to a token that there is not.
    row = torch.arange(gather_idx.numel(), device=x.device)
    token = gather_idx.masked_fill(row >= offsets[-1], num_tokens)
    tokens, order = torch.sort(token, stable=True)
    first = torch.searchsorted(tokens, torch.arange(num_tokens + 1, device=x.device))
    out = torch.empty_like(x)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(hidden, _SUM_COLUMNS))
        products.sum_rows_of_token[grid](
            rows, order, first, out, hidden, PRECISION=_precision(x.dtype), BLOCK_H=_SUM_COLUMNS
        )
    return out


def _height(num_rows: int, num_experts: int) -> int:
    return 16 if _INTERPRETED else tile_height(num_rows, num_experts)


def _precision(dtype: torch.dtype) -> str:
    """Full float32 where float32 is asked for; half precision has one way to be multiplied on a GPU."""
    return "ieee" if dtype == torch.float32 or _INTERPRETED else "tf32"


def _clamped(activation: Activation) -> bool:
    return isinstance(activation, ClampedSwiGLU)


def _constants(activation: Activation) -> tuple[float, float]:
    return (activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLU) else (1.0, 0.0)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A kernel wants a pointer even for what it does not read."""
    return other if tensor is None else tensor.contiguous()
