"""Codecs of quantized tensors, with one scale per block (``automoe.hf.schemes``).

``dequantize`` works on a rectangle of a matrix and takes the rectangle's position, because
blocks are counted from the matrix' first element and a shard may begin inside a block. The other
functions take whole matrices, or rows of whole groups. A number is float32(code) times
float32(scale), rounded once to float32; the caller converts it further. So a value does not depend
on the rank that dequantizes it, nor on how the matrix is sharded. Shapes: R rows, C columns, G
groups of 32 numbers in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automoe.hf.keys import FP8_BLOCK, GROUP, Encoding
from automoe.hf.schemes import FORMATS
from automoe.quantize.formats import E4M3, LARGEST, encode, tile_amax

# Magnitudes at which the next code of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) begins: the midpoints of
# neighbours. Ties go to the even code, so every other border is moved up by the least step.
_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BORDERS[::2] = _BORDERS[::2].nextafter(torch.tensor(torch.inf))


def dequantize_fp8(
    codes: Tensor,
    scales: Tensor,
    start: tuple[int, int] = (0, 0),
    block: tuple[int, int] = FP8_BLOCK,
) -> Tensor:
    """Return a rectangle of a block-FP8 matrix in float32.

    Args:
        codes: [R, C] float8_e4m3fn.
        scales: scales of the blocks that the rectangle touches, [row blocks, column blocks]; any
            float dtype.
        start: row and column of the rectangle's first element in the whole matrix.
        block: rows and columns of a block.
    """
    return dequantize("fp8", codes, scales, start, block)


def dequantize(
    encoding: Encoding,
    codes: Tensor,
    scales: Tensor,
    start: tuple[int, int],
    block: tuple[int, int],
    beside: Tensor | None = None,
) -> Tensor:
    """Return a rectangle of a quantized matrix in float32, [rows, columns].

    Args:
        encoding: rule that turns codes and scales into numbers, such as ``fp8`` or ``nvfp4``.
        codes: codes of the rectangle's rows; packed encodings have several numbers per element.
        scales: scales of the blocks that the rectangle touches, [row blocks, column blocks].
        start: row and column of the rectangle's first element in the whole matrix.
        block: rows and columns of a block.
        beside: third tensor of some encodings: the divisor [1, 1] of NVFP4's scales, or the zero
            points, shaped like the scales.
    """
    num_rows = codes.shape[0]
    rows = torch.arange(start[0], start[0] + num_rows).div_(block[0], rounding_mode="floor")
    rows -= start[0] // block[0]
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    by_row = scales.to(torch.float32)
    zeros = None
    if beside is not None and encoding == "nvfp4":
        by_row = by_row / beside
    elif beside is not None:
        zeros = beside.to(torch.float32)[rows]
    by_row = by_row[rows]
    numbers, factor = _widened(encoding, codes)
    if factor != 1:
        by_row = by_row * factor
    num_cols = numbers.shape[1]
    for begin, end in _spans(start[1], num_cols, block[1]):
        first = (start[1] + begin) // block[1] - start[1] // block[1]
        count = max(1, (end - begin) // block[1])
        part = numbers[:, begin:end].unflatten(1, (count, -1))
        if zeros is not None:
            part.sub_(zeros[:, first : first + count, None])
        part.mul_(by_row[:, first : first + count, None])
    return numbers


def _widened(encoding: Encoding, codes: Tensor) -> tuple[Tensor, int]:
    """Return (float32 [R, C], factor): the value of a code is its float32 number times the factor.

    ``codes`` are [R, C], or [R, fewer columns] if an element packs several codes.
    """
    if encoding in ("mxfp4", "mxfp4_rows", "nvfp4"):
        return _from_e2m1(codes), 1
    if encoding in ("int4", "int8_packed"):
        return unpack_integers(codes, FORMATS[encoding].packed), 1
    if encoding == "int8":
        return codes.to(torch.float32), 1
    bits = codes.view(torch.int8)
    # NaN is set explicitly: the conversion below would turn it into 480.
    if bits.numel() and int((bits & 0x7F).max()) == 0x7F:
        return codes.to(torch.float32), 1
    # The seven bits below the sign, read as exponent and mantissa of float16, give the number
    # over 256. This is ten times faster on a CPU than torch's conversion, and as exact.
    half = bits.to(torch.int16).mul_(128).bitwise_and_(-16385)
    return half.view(torch.float16).to(torch.float32), 256


def _spans(start: int, size: int, block: int) -> list[tuple[int, int]]:
    """Split ``size`` columns of a matrix, from column ``start`` on, at the borders of blocks.

    Returns up to three half-open ranges, counted from ``start``: the end of a block, whole blocks,
    and the beginning of a block. Empty ones are left out.
    """
    head = min(size, -start % block)
    tail = head + (size - head) // block * block
    return [(begin, end) for begin, end in ((0, head), (head, tail), (tail, size)) if begin < end]


def quantize_fp8(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and float32 scales of a matrix [R, C] in block-FP8, on the CPU.

    Codes are [R, C] float8_e4m3fn, scales are [ceil(R/128), ceil(C/128)].

    A block's scale maps the block's largest magnitude to 448; a block of zeros has scale one.
    """
    numbers = numbers.cpu()
    scales = tile_amax(numbers, FP8_BLOCK) / LARGEST[E4M3]
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return encode(numbers, scales, E4M3, FP8_BLOCK).codes, scales


def dequantize_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return R rows of G groups of 32 numbers of an MXFP4 matrix, in float32 [R, 32 * G].

    Numbers are e2m1 and scales e8m0 (OCP Microscaling formats 1.0).

    Args:
        codes: [R, 16 * G] uint8, two numbers a byte, the earlier one in the low bits.
        scales: [R, G] uint8, exponents with bias 127 (e8m0).
    """
    return dequantize("mxfp4", codes, scales, (0, 0), (1, GROUP))


def _from_e2m1(codes: Tensor) -> Tensor:
    byte = codes.to(torch.int16)
    half = torch.empty((*codes.shape, 2), dtype=torch.int16)
    # The three bits below the sign, read as last exponent bits and first mantissa bit of float16,
    # give the number over 2**14.
    half[..., 0] = (byte & 0x07) * 0x200 + (byte & 0x08) * 0x1000
    half[..., 1] = (byte & 0x70) * 0x20 + (byte & 0x80) * 0x100
    numbers = half.view(torch.float16).to(torch.float32).flatten(1)
    numbers.mul_(2.0**14)
    return numbers


def dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return R rows of G groups of 32 numbers of an INT4 matrix, in float32 [R, 32 * G].

    The layout is ``pack-quantized`` of compressed-tensors with 4 bits, symmetric.

    Args:
        codes: [R, 4 * G] int32, eight numbers each, the earlier ones in the lower bits; a number is
            its code less 8.
        scales: [R, G], any float dtype.
    """
    return dequantize("int4", codes, scales, (0, 0), (1, GROUP))


def unpack_integers(codes: Tensor, packed: int) -> Tensor:
    """Return the signed numbers that int32 words [R, words] hold, in float32 [R, words * packed].

    Args:
        packed: numbers in a word: 8 of 4 bits, or 4 of 8 bits.
    """
    byte = codes.contiguous().view(torch.uint8)
    if packed == 8:
        byte = torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(1)
    return byte.to(torch.float32) - (1 << 32 // packed - 1)


def quantize_mxfp4(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R, C / 2] and scales [R, C / 32] of a matrix [R, C] in MXFP4, both uint8.

    The function follows OCP Microscaling formats 1.0, section 6.3. A scale maps its group's largest
    magnitude to between 4 and 8. Numbers are rounded to nearest, ties to even, and numbers above 6
    become 6. A group of zeros has scale one; a group with NaN or infinite numbers has scale NaN.
    """
    groups = numbers.to(torch.float32).contiguous().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    exponents = (amax.frexp().exponent - 3).masked_fill(amax == 0, 0).clamp(min=-127)
    scaled = groups.ldexp(-exponents.unsqueeze(-1))
    codes = torch.bucketize(scaled.abs(), _BORDERS, right=True, out_int32=True).to(torch.uint8)
    scales = (exponents + 127).to(torch.uint8).masked_fill(~amax.isfinite(), 255)
    return _joined(codes | scaled.signbit().to(torch.uint8) << 3), scales


def quantize_int4(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R, C / 8] int32 and scales [R, C / 32] bfloat16 of a matrix [R, C] in INT4.

    A scale maps its group's largest magnitude to 7.5, as in compressed-tensors, and numbers that
    round to 8 become 7. A group of zeros has scale one.
    """
    groups = numbers.to(torch.float32).unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    scales = scales.masked_fill(scales == 0, 1)
    codes = (groups / scales.unsqueeze(-1).to(torch.float32)).round().clamp(-8, 7) + 8
    return _joined(codes.to(torch.uint8)).view(torch.int32), scales


def _joined(codes: Tensor) -> Tensor:
    """Pack two codes into a byte, the earlier one in the low bits: [R, G, 32] to [R, 16 * G]."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).flatten(-2)


# For each encoding with scales per group: the codec of a matrix.
CODECS = {"mxfp4": (quantize_mxfp4, dequantize_mxfp4), "int4": (quantize_int4, dequantize_int4)}


def to_codes(
    numbers: Tensor, encoding: Encoding, old_parts: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Return the tensors that a file stores for a tensor: its numbers, or codes and scales.

    INT4 also stores the tensor's shape. Codes and scales are on the CPU.

    Args:
        numbers: the tensor in the checkpoint's layout, not transposed.
        old_parts: codes and scales of the tensor in another file. Groups of MXFP4 and INT4 keep
            them if they still decode to ``numbers``, since several codes and scales give the same
            numbers.
    """
    if encoding == "plain":
        return (numbers,)
    numbers = numbers.cpu()
    if encoding == "fp8":
        return quantize_fp8(numbers)
    if encoding == "int4":
        return *_encode_rows(numbers, encoding, old_parts), torch.tensor(numbers.shape)
    experts = [
        _encode_rows(matrix.T, encoding, [part[i] for part in old_parts])
        for i, matrix in enumerate(numbers)
    ]
    codes, scales = map(torch.stack, zip(*experts, strict=True))
    return codes.unflatten(-1, (-1, GROUP // 2)), scales


def from_codes(parts: Sequence[Tensor], encoding: Encoding) -> Tensor:
    """Decode a file's codes and scales to float32, in the shape of the unquantized tensor.

    Args:
        parts: whole tensors that the file stores: codes, scales; a third one is ignored.
        encoding: ``fp8``, ``int4`` or ``mxfp4``.
    """
    codes, scales = parts[:2]
    if encoding == "fp8":
        return dequantize_fp8(codes, scales)
    if encoding == "int4":
        return dequantize_int4(codes, scales)
    experts = zip(codes.flatten(-2), scales, strict=True)
    return torch.stack([dequantize_mxfp4(*expert).T for expert in experts])


def _encode_rows(
    matrix: Tensor, encoding: Encoding, old_parts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    quantize, dequantize = CODECS[encoding]
    codes, scales = quantize(matrix)
    if not old_parts:
        return codes, scales
    old, old_scales = old_parts[0].reshape(codes.shape), old_parts[1]
    same = (
        dequantize(old, old_scales).to(matrix.dtype).eq(matrix).unflatten(-1, (-1, GROUP)).all(-1)
    )
    whole = same.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)
    return torch.where(whole, old, codes), torch.where(same, old_scales, scales)
