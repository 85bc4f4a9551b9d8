"""Grouped products of 8-bit operands with block scales, which torch has not for Hopper.

A scale holds for 128 numbers of the summed dim, so each step sums 128 products on the matrix units and is then scaled
into the float32 accumulator (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Like the other kernels of this
room they write each number once, without atomics. Shapes: R rows sorted by expert, E experts, K summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from automoe.kernels.blocks import INTERPRETED
from automoe.kernels.products import _narrow, _rows_of_tile
from automoe.kernels.tiles import row_tiles, tile_height

WARPS, STAGES = 8, 3
_SIDE = tl.constexpr(128)
_COLUMNS = tl.constexpr(64)  # of a gradient of weights: with 128 the accumulators spill


@triton.jit
def _scaled_dot(a, b, PRECISION: tl.constexpr):
    """a @ b of 8-bit blocks in float32."""
    if PRECISION == "ieee":  # the interpreter multiplies no 8-bit numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def rows_by_blocks(
    a,  # [R, K]
    a_scales,  # [R, blocks of K]
    w,  # [E, N, K]
    w_scales,  # [E, blocks of N, blocks of K]
    out,  # [R, N], written
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    num_experts,
    K,
    N,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """out = a @ w.T of each row's expert."""
    expert, column, first, row, real = _rows_of_tile(
        tile_expert, tile_row, offsets, num_tiles, num_experts, tl.cdiv(N, _SIDE), BLOCK_M
    )
    if expert >= num_experts:
        return
    cols = column * _SIDE + tl.arange(0, _SIDE)
    inside = cols < N
    k = tl.arange(0, _SIDE)
    blocks = tl.cdiv(K, _SIDE)
    a += first * K + row[:, None] * K + k[None, :]
    w += expert.to(tl.int64) * N * K + cols[None, :].to(tl.int64) * K + k[:, None]
    a_scales += (first + row) * blocks
    w_scales += (expert.to(tl.int64) * tl.cdiv(N, _SIDE) + column) * blocks
    acc = tl.zeros((BLOCK_M, _SIDE), tl.float32)
    for block in range(0, blocks):
        in_k = k < K - block * _SIDE
        product = _scaled_dot(
            tl.load(a, mask=real[:, None] & in_k[None, :], other=0.0),
            tl.load(w, mask=in_k[:, None] & inside[None, :], other=0.0),
            PRECISION,
        )
        scale = tl.load(a_scales + block, mask=real, other=0.0) * tl.load(w_scales + block)
        acc += product * scale[:, None]
        a += _SIDE
        w += _SIDE
    tl.store(
        out + first * N + row[:, None] * N + cols[None, :],
        _narrow(acc, out.dtype.element_ty, PRECISION),
        mask=real[:, None] & inside[None, :],
    )


@triton.jit
def weights_by_lines(
    a,  # [M, R]
    a_scales,  # [M, R / 128]
    b,  # [N, R]
    b_scales,  # [N, R / 128]
    out,  # [E, M, N], written
    offsets,
    R,
    M,
    N,
    PRECISION: tl.constexpr,
):
    """out[e] = a @ b.T over the columns of e, which begin and end where lines do."""
    num_columns = tl.cdiv(N, _COLUMNS)
    blocks = tl.cdiv(M, _SIDE) * num_columns
    expert = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0) // _SIDE
    end = tl.load(offsets + expert) // _SIDE
    m = ((block // num_columns) * _SIDE + tl.arange(0, _SIDE)).to(tl.int64)
    n = ((block % num_columns) * _COLUMNS + tl.arange(0, _COLUMNS)).to(tl.int64)
    k = tl.arange(0, _SIDE)
    lines = R // _SIDE
    a += m[:, None] * R + first * _SIDE + k[None, :]
    b += n[None, :] * R + first * _SIDE + k[:, None]
    a_scales += m * lines
    b_scales += n * lines
    acc = tl.zeros((_SIDE, _COLUMNS), tl.float32)
    for line in range(first, end):
        product = _scaled_dot(
            tl.load(a, mask=(m < M)[:, None], other=0.0),
            tl.load(b, mask=(n < N)[None, :], other=0.0),
            PRECISION,
        )
        by_row = tl.load(a_scales + line, mask=m < M, other=0.0)
        by_col = tl.load(b_scales + line, mask=n < N, other=0.0)
        acc += product * by_row[:, None] * by_col[None, :]
        a += _SIDE
        b += _SIDE
    to = out + expert.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    tl.store(to, _narrow(acc, out.dtype.element_ty, PRECISION), mask=(m < M)[:, None] & (n < N)[None, :])


def block_scaled_rows(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a [R, K] @ w[e].T -> [R, N] in ``dtype``; shapes as ``rows_by_blocks``, all contiguous."""
    (num_rows, summed), (num_experts, num_cols, _) = a.shape, w.shape
    out = torch.empty(num_rows, num_cols, dtype=dtype, device=a.device)
    tiles = row_tiles(offsets, num_rows, 16 if INTERPRETED else tile_height(num_rows, num_experts))
    rows_by_blocks[(tiles.slots * triton.cdiv(num_cols, 128),)](
        a, a_scales, w, w_scales, out, tiles.expert, tiles.first_row, tiles.offsets, tiles.slots, num_experts,
        summed, num_cols, PRECISION=_precision(), BLOCK_M=tiles.height, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def block_scaled_weights(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, R] @ b [N, R].T -> [E, M, N] in ``dtype``; shapes as ``weights_by_lines``, all contiguous."""
    (m, num_rows), n = a.shape, b.shape[0]
    out = torch.empty(offsets.numel(), m, n, dtype=dtype, device=a.device)
    grid = offsets.numel() * triton.cdiv(m, 128) * triton.cdiv(n, _COLUMNS.value)
    weights_by_lines[(grid,)](
        a, a_scales, b, b_scales, out, offsets, num_rows, m, n,
        PRECISION=_precision(), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def _precision() -> str:
    return "ieee" if INTERPRETED else "tf32"
