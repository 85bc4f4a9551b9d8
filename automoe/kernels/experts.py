"""``moe.experts=triton``: gather, two products and the activation without a permuted copy.

Kept for the backward beside the arguments: gate and up before the activation, [R, 2I]. Shapes as in
``automoe.moe.experts``. The kernels have compiled for Hopper and run in Triton's
interpreter; they have not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from automoe.errors import BackendError
from automoe.kernels import launches
from automoe.kernels.blocks import INTERPRETED
from automoe.kernels.tiles import RowTiles, row_tiles, tile_height
from automoe.moe.activation import SWIGLU, Activation
from automoe.moe.grouped_mm import of_each_row, sum_by_expert

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CAPABILITIES = (9, 10)  # Hopper and datacenter Blackwell: blocks want their 227 KB of shared memory


def experts() -> Callable[..., torch.Tensor]:
    """``triton_experts``, where there is a GPU that they fit.

    Raises:
        BackendError: this machine's GPU is another.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in _CAPABILITIES:
        raise BackendError(
            "moe.experts=triton is written for compute capabilities 9 and 10, Hopper and datacenter Blackwell, and this "
            f"GPU has {torch.cuda.get_device_capability()}. Set moe.experts=grouped_mm"
        )
    return triton_experts


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
    if x.device.type != "cuda" and not INTERPRETED:
        raise BackendError(
            f"moe.experts=triton needs a CUDA device, and the model is on {x.device}. Choose "
            "moe.experts=grouped_mm, or set TRITON_INTERPRET=1 to try the kernels out, very slowly"
        )
    return _TritonExperts.apply(x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, activation)


class _TritonExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, activation):
        args = (x, gather_idx, offsets.int(), probs, w_gate_up, w_down, b_gate_up, b_down)
        args = [None if arg is None else arg.contiguous() for arg in args]  # kernels go by the shape
        x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down = args
        ctx.activation = activation
        if gather_idx.numel() == 0:  # a grid without programs is an error; autograd still comes by
            pre, out = x.new_empty(0, 2 * w_gate_up.shape[2]), x.new_empty(0, x.shape[1])
        else:
            tiles = _tiles(offsets, gather_idx)
            pre, act = launches.gather_up_activate(x, gather_idx, w_gate_up, b_gate_up, probs, tiles, activation)
            out = launches.down(act, w_down, b_down, probs, tiles)
        ctx.save_for_backward(*args, pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, pre = ctx.saved_tensors
        if gather_idx.numel() == 0:  # zeros and not None: all ranks must reduce the same gradients
            trained = (x, probs, w_gate_up, w_down, b_gate_up, b_down)
            zeros = [None if tensor is None else torch.zeros_like(tensor) for tensor in trained]
            return zeros[0], None, None, *zeros[1:], None
        grad_out = grad_out.contiguous()
        tiles = _tiles(offsets, gather_idx)
        grad_pre, act, shares = launches.grad_down_activate(grad_out, w_down, probs, pre, tiles, ctx.activation)
        grad_probs = shares.sum(1)
        grad_w_down = launches.grad_weights(grad_out, act, None, offsets, torch.empty_like(w_down))
        grad_w_gate_up = launches.grad_weights(grad_pre, x, gather_idx, offsets, torch.empty_like(w_gate_up))
        grad_b_gate_up = grad_b_down = None
        if b_gate_up is not None:
            grad_b_gate_up = sum_by_expert(grad_pre, offsets).view_as(b_gate_up)
        if b_down is not None:
            grad_b_down = sum_by_expert(grad_out * probs.unsqueeze(1).to(x.dtype), offsets)
            bias = of_each_row(b_down, offsets, gather_idx.numel())
            grad_probs += (grad_out * bias).sum(-1, dtype=torch.float32)
        grad_x = launches.sum_of_tokens(launches.grad_rows(grad_pre, w_gate_up, tiles), gather_idx, offsets, x)
        return (
            grad_x, None, None, grad_probs.to(probs.dtype), grad_w_gate_up, grad_w_down,
            grad_b_gate_up, grad_b_down, None,
        )  # fmt: skip


def _tiles(offsets: torch.Tensor, gather_idx: torch.Tensor) -> RowTiles:
    num_rows = gather_idx.numel()
    return row_tiles(offsets, num_rows, 16 if INTERPRETED else tile_height(num_rows, offsets.numel()))
