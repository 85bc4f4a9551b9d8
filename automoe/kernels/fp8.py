"""Kernels for 8-bit numbers with block scales: quantization, and grouped products.

Torch has no such grouped products for Hopper. Quantization is one pass over memory: it computes
each tile's largest number, its scale and its codes. The results equal those of
``automoe.quantize.formats`` in plain torch, except that zeros have no sign here.

The scales of a product hold for 128 numbers of the summed dim. So each step sums 128 products on
the tensor cores, and the result is scaled and added to the float32 accumulator (DeepSeek-V3, arXiv
2412.19437, section 3.3.2). Each number is written once, without atomics. Shapes: R rows sorted by
expert, E experts, K summed.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from automoe.kernels.products import _block, _dot, _load, _rows_of_tile, _store
from automoe.kernels.tiling import precision, row_tiles

WARPS = 8
STAGES = 3
_SIDE = tl.constexpr(128)
_COLUMNS = tl.constexpr(64)  # columns per program of a weight gradient: 128 would spill registers
_HEIGHT = 32  # rows per program if each row has scales of its own
FORMATS = {
    torch.float8_e4m3fn: dict(FORMAT=tl.float8e4nv, MANTISSA=3, LEAST=-6),
    torch.float8_e5m2: dict(FORMAT=tl.float8e5, MANTISSA=2, LEAST=-14),
}


@triton.jit
def _scales_of_rows(numbers, largest, BLOCK: tl.constexpr, HEIGHT: tl.constexpr):
    """Triton function: return the float8 scale [HEIGHT] of each row of ``numbers`` [HEIGHT, 128].

    A scale is the smallest power of two for which no magnitude |number| / scale exceeds ``largest``: 1 for a
    row of zeros, NaN if a number of the row is not finite. With BLOCK all rows share one scale.
    """
    size = tl.max(tl.abs(numbers), axis=1)
    # NaN is checked separately, since a maximum may ignore it.
    finite = tl.min((tl.abs(numbers) < float("inf")).to(tl.int32), axis=1)
    if BLOCK:
        size = tl.max(size, axis=0) + tl.zeros((HEIGHT,), tl.float32)
        finite = tl.min(finite, axis=0) + tl.zeros((HEIGHT,), tl.int32)
    # The next power of two: one more in the exponent if the mantissa has a bit set.
    bits = tl.maximum(tl.div_rn(size, largest), 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    bits = ((bits + 0x7FFFFF) >> 23) << 23
    scale = tl.where(size == 0.0, 1.0, bits.to(tl.float32, bitcast=True))
    return tl.where(finite == 1, scale, float("nan"))


@triton.jit
def _rounded(numbers, largest, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Triton function: round numbers to the nearest values of a float8 format, ties to even.

    Numbers beyond +-``largest`` are clamped to it; infinities become NaN. MANTISSA is the format's
    number of mantissa bits, LEAST the exponent of its smallest normal number.
    """
    infinite = tl.abs(numbers) == float("inf")
    numbers = tl.where(numbers > largest, largest, tl.where(numbers < -largest, -largest, numbers))
    numbers = tl.where(infinite, float("nan"), numbers)
    # Casts differ between GPUs and the interpreter. This is exact: adding ``far`` rounds away the
    # bits below the format's step, and subtracting it gives the rounded number.
    exponent = tl.maximum((tl.abs(numbers).to(tl.int32, bitcast=True) >> 23), LEAST + 127)
    # 1.5 * 2**23 steps
    far = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True) * 12582912.0
    return (numbers + far) - far


@triton.jit
def encode_tiles(
    x,  # [batch, num_rows, num_cols] by its strides
    scales,  # [batch, rows or blocks of them, blocks of columns], written if FIND
    codes,  # [batch, num_rows, num_cols] uint8, written
    num_rows,
    num_cols,
    stride_batch,
    stride_row,
    stride_col,
    largest,
    FIND: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    FORMAT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Triton kernel: quantize HEIGHT rows of 128 columns per program to float8 codes and scales.

    Args:
        x: [batch, num_rows, num_cols], read by its three strides.
        scales: float32 [batch, tiles down, tiles across].
        codes: receives the codes [batch, num_rows, num_cols] as uint8.
        largest: largest number of the float8 format.
        FIND: True computes and stores ``scales``, False reads them.
        BLOCK: True: one scale for all HEIGHT rows, else one per row.
        FORMAT: dtype of the codes, with MANTISSA mantissa bits and LEAST the exponent of its
            smallest normal number.
    """
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT).to(tl.int64)
    col = tl.program_id(0) * _SIDE + tl.arange(0, _SIDE).to(tl.int64)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    at = x + batch * stride_batch + row[:, None] * stride_row + col[None, :] * stride_col
    numbers = _load(at, mask)
    if BLOCK:
        row_of_scales = tl.program_id(1) + tl.zeros((HEIGHT,), tl.int64)
        rows_of_scales = tl.cdiv(num_rows, HEIGHT)
    else:
        row_of_scales = row
        rows_of_scales = num_rows
    blocks = tl.cdiv(num_cols, _SIDE)
    at_scale = scales + (batch * rows_of_scales + row_of_scales) * blocks + tl.program_id(0)
    known = row_of_scales < rows_of_scales
    if FIND:
        scale = _scales_of_rows(numbers, largest, BLOCK, HEIGHT)
        tl.store(at_scale, scale, mask=known)
    else:
        scale = tl.load(at_scale, mask=known, other=1.0)
    numbers = _rounded(tl.div_rn(numbers, scale[:, None]), largest, MANTISSA, LEAST)
    to = codes + (batch * num_rows + row[:, None]) * num_cols + col[None, :]
    coded = numbers.to(FORMAT).to(tl.uint8, bitcast=True)
    tl.store(to, tl.where(numbers == numbers, coded, 0x7F), mask=mask)  # NaN of both formats


def encode_in_one_pass(
    x: Tensor, scales: Tensor | None, dtype: torch.dtype, largest: float, height: int
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` [..., R, C] in one kernel; return float8 codes [..., R, C] and scales.

    Args:
        scales: [..., tiles down, tiles across] to use; None: scales are computed.
        dtype: float8 dtype of the codes.
        largest: largest number of ``dtype``.
        height: rows of a tile (the numbers that share a scale), 1 or 128; a tile has 128 columns.
    """
    rows, cols = x.shape[-2:]
    flat = x.detach().reshape(prod(x.shape[:-2]), rows, cols)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    find = scales is None
    if scales is None:
        scales = torch.empty(
            (*x.shape[:-2], triton.cdiv(rows, height), triton.cdiv(cols, 128)), dtype=torch.float32, device=x.device
        )  # fmt: skip
    scales = scales.contiguous()
    if codes.numel():
        block = height == 128
        step = height if block else _HEIGHT
        encode_tiles[(triton.cdiv(cols, 128), triton.cdiv(rows, step), flat.shape[0])](
            flat, scales, codes.view(torch.uint8), rows, cols, *flat.stride(), largest,
            FIND=find, BLOCK=block, HEIGHT=step, num_warps=WARPS, **FORMATS[dtype],
        )  # fmt: skip
    return codes, scales


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
    """Triton kernel: multiply each row of ``a`` by its expert's weight, a @ w[e].T, in float8.

    ``a`` [R, K], sorted by expert, and ``w`` [E, N, K] give ``out`` [R, N]; a program computes one
    tile of an expert's rows and 128 columns. ``a`` has one scale for each 128 numbers of a row,
    ``w`` one for each block of 128 x 128. PRECISION is ``input_precision`` of ``tl.dot``, BLOCK_M the tile's height.

    Args:
        tile_expert, tile_row: [num_tiles] expert and first row of each tile of rows (``RowTiles``).
        offsets: [E] end of each expert's rows.
        num_tiles: length of ``tile_expert``, including entries without a tile.
    """
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
        product = _dot(_block(a, real, in_k), _block(w, in_k, inside), None, PRECISION)
        scale = tl.load(a_scales + block, mask=real, other=0.0) * tl.load(w_scales + block)
        acc += product * scale[:, None]
        a += _SIDE
        w += _SIDE
    to = out + first * N + row[:, None] * N + cols[None, :]
    _store(to, acc, real[:, None] & inside[None, :], PRECISION)


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
    """Triton kernel: compute out[e] = a_e @ b_e.T in float8, with a_e the columns of expert e in a.

    This is the gradient of the experts' weights: ``a`` [M, R] and ``b`` [N, R] give [E, M, N]. An
    expert's columns begin and end at multiples of 128 (``offsets`` are their ends); ``a`` and ``b``
    have one scale for each 128 numbers of a row. PRECISION is ``input_precision`` of ``tl.dot``.
    """
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
        product = _dot(
            tl.load(a, mask=(m < M)[:, None], other=0.0),
            tl.load(b, mask=(n < N)[None, :], other=0.0),
            None,
            PRECISION,
        )
        by_row = tl.load(a_scales + line, mask=m < M, other=0.0)
        by_col = tl.load(b_scales + line, mask=n < N, other=0.0)
        acc += product * by_row[:, None] * by_col[None, :]
        a += _SIDE
        b += _SIDE
    to = out + expert.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    _store(to, acc, (m < M)[:, None] & (n < N)[None, :], PRECISION)


def block_scaled_product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply float8 operands with block scales for each expert; return the result in ``dtype``.

    Two products, by the shape of ``b``: rows of ``a`` [R, K] times their expert's weight ``b`` [E,
    N, K] give [R, N]; the columns of ``a`` [M, R] and ``b`` [N, R] that belong to an expert,
    multiplied as a @ b.T, give [E, M, N]. All tensors are contiguous.

    Args:
        a_scales: [R, K / 128], or [M, R / 128].
        b_scales: [E, N / 128, K / 128], or [N, R / 128].
        offsets: [E] end of each expert along R; in the second product multiples of 128.
    """
    fixed = dict(PRECISION=precision(a.dtype), num_warps=WARPS, num_stages=STAGES)
    num_experts = offsets.numel()
    num_rows = a.shape[0]
    num_cols = b.shape[-2]
    summed = a.shape[1]
    if b.dim() == 2:
        out = torch.empty(num_experts, num_rows, num_cols, dtype=dtype, device=a.device)
        grid = (num_experts * triton.cdiv(num_rows, 128) * triton.cdiv(num_cols, _COLUMNS.value),)
        weights_by_lines[grid](
            a, a_scales, b, b_scales, out, offsets, summed, num_rows, num_cols, **fixed
        )
        return out
    out = torch.empty(num_rows, num_cols, dtype=dtype, device=a.device)
    tiles = row_tiles(offsets, num_rows)
    rows_by_blocks[(tiles.slots * triton.cdiv(num_cols, 128),)](
        a, a_scales, b, b_scales, out, tiles.expert, tiles.first_row, tiles.offsets, tiles.slots, num_experts,
        summed, num_cols, BLOCK_M=tiles.height, **fixed,
    )  # fmt: skip
    return out
