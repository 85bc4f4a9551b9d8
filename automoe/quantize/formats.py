"""Float8 quantization with one power-of-two scale per tile, in plain torch on any device.

A scale is a power of two, so it changes only exponents. A number whose code is in the normal range
is rounded the same way under every scale: neither the other numbers of its tile nor quantizing it
again along the other dim change the result. Only numbers that the scale pushes below the normal
range lose bits (below 2**-15 of the tile's largest number for e4m3, below 2**-30 for e5m2).

Letters: R rows, C columns of a matrix; leading dims are a batch of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from automoe.config import facts

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

SIDE = facts.BLOCK
Tile = tuple[int, int]  # rows and columns that share a scale
WHOLE = (0, 0)  # The matrix has one scale.
LINE = (1, SIDE)  # Every 128 numbers of a row have one scale.
BLOCK = (SIDE, SIDE)  # Every square of 128 x 128 numbers has one scale.


@dataclass(frozen=True)
class Quantized:
    """Quantized matrix or batch of matrices: each number is its code times the scale of its tile.

    Attributes:
        codes: [..., R, C] float8.
        scales: [..., tiles down, tiles across] float32; [..., 1, 1] if the tile is ``WHOLE``.
        tile: rows and columns that share a scale, counted from the first row and column; ``WHOLE``
            if the entire matrix shares one.
    """

    codes: Tensor
    scales: Tensor
    tile: Tile


def tile_amax(x: Tensor, tile: Tile) -> Tensor:
    """Return the largest magnitude of each tile (numbers that share a scale) in float32.

    It is zero for an empty matrix. Shapes: [..., R, C] -> [..., tiles down, tiles across].
    """
    x = x.detach()
    if tile == WHOLE:
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-2], 1, 1, dtype=torch.float32)
        low, high = x.flatten(-2).aminmax(dim=-1)  # one pass without a copy
        return torch.maximum(high, -low).to(torch.float32).unsqueeze(-1).unsqueeze(-1)
    x = x.to(torch.float32)
    rows, cols = x.shape[-2:]
    down = -(-rows // tile[0])
    across = -(-cols // tile[1])
    padded = F.pad(x, (0, across * tile[1] - cols, 0, down * tile[0] - rows))
    return padded.abs().view(*x.shape[:-2], down, tile[0], across, tile[1]).amax(dim=(-3, -1))


def scales_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest powers of two for which amax / scale is in the range of ``dtype``.

    ``amax`` has the largest magnitude of each tile. A scale is one if ``amax`` is zero, NaN if
    ``amax`` is not finite. Scales are at least 2**-126, so that dividing and multiplying by them is
    exact.
    """
    mantissa, exponent = torch.frexp((amax / LARGEST[dtype]).clamp_min(2.0**-126))
    scales = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))
    scales = torch.where(amax == 0, torch.ones_like(scales), scales)
    return torch.where(amax.isfinite(), scales, torch.full_like(scales, torch.nan))


def encode(x: Tensor, scales: Tensor, dtype: torch.dtype, tile: Tile) -> Quantized:
    """Quantize ``x`` [..., R, C]: divide each number by its tile's scale and round it to ``dtype``.

    Numbers out of range become the largest code of their sign.

    Infinite numbers become NaN instead, so the failure of the step that produced them stays
    visible. Codes are row-major for every layout of ``x``.

    Args:
        scales: [..., tiles down, tiles across] float32.
        dtype: float8 dtype of the codes.
        tile: rows and columns that share a scale; ``WHOLE`` if the entire matrix shares one.
    """
    if x.is_cuda:
        return _in_one_pass(x, scales, dtype, tile)
    numbers = x.detach().to(torch.float32) / _spread(scales, tile, x.shape)
    limit = LARGEST[dtype]
    numbers = numbers.clamp(-limit, limit).masked_fill(numbers.isinf(), torch.nan)
    return Quantized(numbers.contiguous().to(dtype), scales, tile)


def quantize(x: Tensor, dtype: torch.dtype, tile: Tile) -> Quantized:
    """Quantize ``x`` [..., R, C] to a float8 ``dtype``, with a scale computed for each tile.

    A ``tile`` is the rows and columns that share a scale; ``WHOLE`` is the entire matrix.
    """
    if x.is_cuda and tile != WHOLE:
        return _in_one_pass(x, None, dtype, tile)
    return encode(x, scales_for(tile_amax(x, tile), dtype), dtype, tile)


def dequantize(q: Quantized) -> Tensor:
    """Return the numbers of ``q`` as float32 [..., R, C]; the product with the scales is exact."""
    return q.codes.to(torch.float32) * _spread(q.scales, q.tile, q.codes.shape)


def transposed(q: Quantized) -> Quantized:
    """Return the transposed matrix, row-major.

    ``WHOLE`` tiles (all of the matrix) and ``BLOCK`` tiles (128 x 128) keep their codes. ``LINE``
    tiles (1 x 128) cannot: their numbers are quantized again in tiles along the other dim
    (DeepSeek-V3, arXiv 2412.19437, section 3.3.3: 1x128 to 128x1).
    """
    if q.tile == LINE:
        return quantize(dequantize(q).transpose(-2, -1), q.codes.dtype, LINE)
    codes = q.codes.transpose(-2, -1).contiguous()
    scales = q.scales.transpose(-2, -1).contiguous()
    return Quantized(codes, scales, q.tile)


def _in_one_pass(x: Tensor, scales: Tensor | None, dtype: torch.dtype, tile: Tile) -> Quantized:
    from automoe.kernels.fp8 import encode_in_one_pass

    if tile == WHOLE:  # The kernel only knows blocks, so each block gets the matrix's scale.
        assert scales is not None
        grid = (-(-x.shape[-2] // SIDE), -(-x.shape[-1] // SIDE))
        codes, _ = encode_in_one_pass(
            x, scales.expand(*scales.shape[:-2], *grid), dtype, LARGEST[dtype], SIDE
        )
        return Quantized(codes, scales, tile)
    codes, scales = encode_in_one_pass(x, scales, dtype, LARGEST[dtype], tile[0])
    return Quantized(codes, scales, tile)


def _spread(scales: Tensor, tile: Tile, shape: torch.Size) -> Tensor:
    """Return each number's scale, broadcastable to ``shape`` [..., R, C], from one scale per tile."""
    if tile == WHOLE:
        return scales
    spread = scales.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return spread.narrow(-2, 0, shape[-2]).narrow(-1, 0, shape[-1])
