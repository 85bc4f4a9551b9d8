"""RMSNorm on a GPU that reads and writes each number once, in the forward and backward pass.

torch's fused kernels take input and weight in one dtype, so a bfloat16 input must first be
converted, in a pass of its own. Here sums are float32 for any input dtype. The gradient of the
weight is summed in a fixed order, so a run repeats bit for bit. Shapes: T rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from automoe.kernels.products import _load, _store
from automoe.kernels.served import INTERPRETED
from automoe.kernels.tiling import precision

_TILE = 4096  # numbers of each operand that a program holds
_PROGRAMS = (
    132 * 8
)  # programs that share the rows of a backward pass: eight per multiprocessor of Hopper


@triton.jit
def _norm_rows(
    x,  # [T, D] by its stride, the last dim dense
    weight,  # [D] float32
    out,  # [T, D], written
    scales,  # [T] float32, written
    num_rows,
    dim,
    stride,
    eps,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    real = row < num_rows
    mask = real[:, None] & (column < dim)[None, :]
    number = _load(x + row[:, None] * stride + column[None, :], mask)
    scale = 1.0 / tl.sqrt(tl.sum(number * number, axis=1) / dim + eps)
    factor = tl.load(weight + column, mask=column < dim, other=0.0)
    normed = number * scale[:, None] * factor[None, :]
    _store(out + row[:, None] * dim + column[None, :], normed, mask, PRECISION)
    tl.store(scales + row, scale, mask=real)


@triton.jit
def _norm_grads(
    grad,  # [T, D] dense
    x,  # [T, D] by its stride
    weight,
    scales,
    grad_x,  # [T, D], written
    shares,  # [programs, D] float32, written: terms of the gradient of the weight
    num_rows,
    dim,
    stride,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)
    in_row = column < dim
    factor = tl.load(weight + column, mask=in_row, other=0.0)[None, :]
    share = tl.zeros((ROWS, BLOCK_D), tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in range(tl.program_id(0) * ROWS, num_rows, step):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        real = row < num_rows
        mask = real[:, None] & in_row[None, :]
        at = row[:, None] * dim + column[None, :]
        number = _load(x + row[:, None] * stride + column[None, :], mask)
        incoming = _load(grad + at, mask)
        scale = tl.load(scales + row, mask=real, other=0.0)[:, None]
        normed = number * scale
        share += incoming * normed
        incoming *= factor
        shrink = tl.sum(incoming * normed, axis=1)[:, None] / dim
        _store(grad_x + at, (incoming - normed * shrink) * scale, mask, PRECISION)
    share = tl.sum(share, axis=0)
    tl.store(shares + tl.program_id(0) * dim + column, share, mask=in_row)


def _tile(dim: int) -> dict[str, int]:
    """Return the arguments of both norm kernels for rows of ``dim`` numbers.

    They are ROWS (rows of a tile), BLOCK_D (``dim`` rounded up to a power of two) and num_warps.
    """
    width = triton.next_power_of_2(dim)
    rows = max(1, _TILE // width)
    return {"ROWS": rows, "BLOCK_D": width, "num_warps": min(16, max(4, width // 512))}


def norm_rows(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm x * scale * weight in the dtype of x, and scale = 1 / sqrt(mean(x^2) + eps).

    Args:
        x_TD: bfloat16, float16 or float32, the last dim dense.
        weight_D: float32.

    Returns:
        The normalized rows [T, D], and the float32 scales [T, 1] for ``norm_grads``.
    """
    num_rows, dim = x_TD.shape
    out_TD = torch.empty((num_rows, dim), dtype=x_TD.dtype, device=x_TD.device)
    scales_T1 = weight_D.new_empty(num_rows, 1)
    if num_rows:
        tile = _tile(dim)
        _norm_rows[(triton.cdiv(num_rows, tile["ROWS"]),)](
            x_TD, weight_D, out_TD, scales_T1, num_rows, dim, x_TD.stride(0), eps,
            PRECISION=precision(x_TD.dtype), **tile,
        )  # fmt: skip
    return out_TD, scales_T1


def norm_grads(
    grad_TD: Tensor, x_TD: Tensor, scales_T1: Tensor, weight_D: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of RMSNorm's input ``x`` [T, D] and ``weight`` [D].

    Args:
        grad_TD: gradient of the output [T, D].
        x_TD, weight_D: the inputs of ``norm_rows``.
        scales_T1: scales that ``norm_rows`` returned, 1 / sqrt(mean(x^2) + eps).
    """
    num_rows, dim = x_TD.shape
    grad_x_TD = torch.empty_like(grad_TD)
    tile = _tile(dim)
    most = 2 if INTERPRETED else _PROGRAMS
    programs = min(most, triton.cdiv(num_rows, tile["ROWS"]))
    shares = weight_D.new_empty(programs, dim)
    if num_rows:
        _norm_grads[(programs,)](
            grad_TD, x_TD, weight_D, scales_T1, grad_x_TD, shares, num_rows, dim, x_TD.stride(0),
            PRECISION=precision(x_TD.dtype), **tile,
        )  # fmt: skip
    return grad_x_TD, shares.sum(0)
