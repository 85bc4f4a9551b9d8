"""Block-FP8 (DeepSeek-V3), MXFP4 (GPT-OSS), INT4 (Kimi): few bits, with one scale per block.

Every function works on a rectangle of a matrix and takes the rectangle's position, because blocks
are counted from the matrix' first element and a shard may begin inside a block. A number is
float32(code) times float32(scale), rounded once to float32; the caller converts it further. So a
value does not depend on the rank that dequantizes it, nor on how the matrix is cut. Shapes: R rows,
C columns.
"""

from __future__ import annotations

import torch

from automoe.hf.keys import FP8_BLOCK
from automoe.quantize.formats import E4M3, LARGEST, encode, tile_amax

# Numbers of a row that share a scale in MXFP4 and INT4; they take 16 bytes.
GROUP = 32


def dequantize_fp8(
    codes: torch.Tensor,
    scales: torch.Tensor,
    start: tuple[int, int] = (0, 0),
    block: tuple[int, int] = FP8_BLOCK,
) -> torch.Tensor:
    """Return a rectangle of a block-FP8 matrix in float32.

    Args:
        codes: [R, C] float8_e4m3fn.
        scales: scales of the blocks that the rectangle touches, [row blocks, column blocks]; any
            float dtype.
        start: row and column of the rectangle's first element in the whole matrix.
        block: rows and columns of a block.
    """
    num_rows, num_cols = codes.shape
    rows = torch.arange(start[0], start[0] + num_rows).div_(block[0], rounding_mode="floor")
    by_row = scales.to(torch.float32)[rows - start[0] // block[0]]
    bits = codes.view(torch.int8)
    # NaN is set explicitly: the conversion below would turn it into 480.
    if bits.numel() and int((bits & 0x7F).max()) == 0x7F:
        numbers = codes.to(torch.float32)
    else:
        # The seven bits below the sign, put where float16 has its exponent and mantissa, are the
        # number over 256: ten times faster on a CPU than torch's conversion, and as exact.
        half = bits.to(torch.int16).mul_(128).bitwise_and_(-16385)
        numbers = half.view(torch.float16).to(torch.float32)
        by_row = by_row * 256
    for begin, end in _spans(start[1], num_cols, block[1]):
        first = (start[1] + begin) // block[1] - start[1] // block[1]
        count = max(1, (end - begin) // block[1])
        part = numbers[:, begin:end].unflatten(1, (count, -1))
        part.mul_(by_row[:, first : first + count, None])
    return numbers


def _spans(start: int, size: int, block: int) -> list[tuple[int, int]]:
    """Split [0, size) at block boundaries: end of a block, whole blocks, start of a block.

    Returns half-open ranges; empty ones are left out.
    """
    head = min(size, -start % block)
    tail = head + (size - head) // block * block
    return [(begin, end) for begin, end in ((0, head), (head, tail), (tail, size)) if begin < end]


def quantize_fp8(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and float32 scales of a matrix [R, C] in block-FP8, on the CPU.

    Codes are [R, C] float8_e4m3fn, scales are [ceil(R/128), ceil(C/128)].

    A block's scale takes its largest magnitude to 448; a block of zeros has scale one.
    """
    numbers = numbers.cpu()
    scales = tile_amax(numbers, FP8_BLOCK) / LARGEST[E4M3]
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return encode(numbers, scales, E4M3, FP8_BLOCK).codes, scales


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows of an MXFP4 matrix in float32, [R, 32 * G].

    Numbers are e2m1 and scales e8m0 (OCP Microscaling formats 1.0).

    Args:
        codes: [R, 16 * G] uint8, two numbers a byte, the earlier one in the low bits.
        scales: [R, G] uint8, exponents with bias 127 (e8m0).
    """
    num_rows, num_groups = scales.shape
    byte = codes.to(torch.int16)
    half = torch.empty((*codes.shape, 2), dtype=torch.int16)
    # The three bits below the sign, put where float16 has its exponent and first mantissa bit, are
    # the number over 2**14.
    half[..., 0] = (byte & 0x07) * 0x200 + (byte & 0x08) * 0x1000
    half[..., 1] = (byte & 0x70) * 0x20 + (byte & 0x80) * 0x100
    numbers = half.view(torch.float16).to(torch.float32).view(num_rows, num_groups, GROUP)
    numbers.mul_(2.0**14)
    numbers.mul_(scales.view(torch.float8_e8m0fnu).to(torch.float32).unsqueeze(-1))
    return numbers.view(num_rows, -1)


def dequantize_int4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows of an INT4 matrix in float32, [R, 32 * G].

    The layout is ``pack-quantized`` of compressed-tensors with 4 bits, symmetric.

    Args:
        codes: [R, 4 * G] int32, eight numbers each, the earlier ones in the lower bits; a number is
            its code less 8.
        scales: [R, G], any float dtype.
    """
    byte = codes.contiguous().view(torch.uint8)
    halves = torch.stack((byte & 0xF, byte >> 4), dim=-1)
    numbers = (halves.view(torch.int8) - 8).to(torch.float32).view(*scales.shape, GROUP)
    return numbers.mul_(scales.to(torch.float32).unsqueeze(-1)).view(codes.shape[0], -1)
