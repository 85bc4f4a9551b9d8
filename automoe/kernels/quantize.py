"""Quantizing in one pass over memory: the largest number of each tile, its scale and its codes at once.

The same numbers as ``automoe.quantize.formats`` makes in plain torch, zeros aside, which have no sign here. Compiled for
Hopper and run in Triton's interpreter; not run on a GPU yet.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

WARPS = 8
_SIDE = tl.constexpr(128)
FORMATS = {
    torch.float8_e4m3fn: dict(FORMAT=tl.float8e4nv, MANTISSA=3, LEAST=-6),
    torch.float8_e5m2: dict(FORMAT=tl.float8e5, MANTISSA=2, LEAST=-14),
}
_HEIGHT = 32  # rows of a program where each has scales of its own


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
    """A program has HEIGHT rows of 128 columns, under one scale if BLOCK, else one a row.

    FORMAT is that of the codes, MANTISSA its bits, LEAST the exponent of its smallest normal number.
    """
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT).to(tl.int64)
    col = tl.program_id(0) * _SIDE + tl.arange(0, _SIDE).to(tl.int64)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    at = x + batch * stride_batch + row[:, None] * stride_row + col[None, :] * stride_col
    numbers = tl.load(at, mask=mask, other=0.0).to(tl.float32)
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
        size = tl.max(tl.abs(numbers), axis=1)
        # A maximum may pass over what is not a number.
        finite = tl.min((tl.abs(numbers) < float("inf")).to(tl.int32), axis=1)
        if BLOCK:
            size = tl.max(size, axis=0) + tl.zeros((HEIGHT,), tl.float32)
            finite = tl.min(finite, axis=0) + tl.zeros((HEIGHT,), tl.int32)
        # The next power of two: one more in the exponent where the mantissa has a bit.
        bits = tl.maximum(tl.div_rn(size, largest), 1.1754943508222875e-38).to(tl.int32, bitcast=True)
        bits = ((bits + 0x7FFFFF) >> 23) << 23
        scale = tl.where(size == 0.0, 1.0, bits.to(tl.float32, bitcast=True))
        scale = tl.where(finite == 1, scale, float("nan"))
        tl.store(at_scale, scale, mask=known)
    else:
        scale = tl.load(at_scale, mask=known, other=1.0)
    numbers = tl.div_rn(numbers, scale[:, None])
    infinite = tl.abs(numbers) == float("inf")
    numbers = tl.where(numbers > largest, largest, tl.where(numbers < -largest, -largest, numbers))
    numbers = tl.where(infinite, float("nan"), numbers)
    # Rounded here, to nearest even, by adding and taking away what leaves no room for smaller steps: casts differ
    # between GPUs and the interpreter, and this one is exact.
    exponent = tl.maximum((tl.abs(numbers).to(tl.int32, bitcast=True) >> 23), LEAST + 127)
    far = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True) * 12582912.0  # 1.5 * 2**23 steps
    numbers = (numbers + far) - far
    to = codes + (batch * num_rows + row[:, None]) * num_cols + col[None, :]
    coded = numbers.to(FORMAT).to(tl.uint8, bitcast=True)
    tl.store(to, tl.where(numbers == numbers, coded, 0x7F), mask=mask)  # NaN of both formats


def encode_in_one_pass(
    x: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, largest: float, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., R, C] and scales of ``x`` [..., R, C]; scales are found where none are given.

    Args:
        scales: [..., tiles down, tiles across] or None.
        largest: number of ``dtype``.
        height: rows of a tile, 1 or 128; it has 128 columns.
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
