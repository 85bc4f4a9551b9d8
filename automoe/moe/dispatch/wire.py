"""Rows in 8 bits on their way to the experts (``moe.dispatch_dtype=fp8``).

A row of H numbers travels as H e4m3 codes and one float32 scale for every 128 columns (DeepSeek-V3,
arXiv 2412.19437, sections 3.3.2 and 3.3.3). Scales are powers of two, so rows that are quantized a
second time keep their numbers. Experts read the decoded rows, and keep the encoded ones for their backward
pass (``keep_encoded``). The gradient of the rounding is the identity: gradients, and the experts'
results, travel in the dtype of the rows.

Shapes: T rows, B encoded rows received, H hidden, W int64 of an encoded row, S scales of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.config.rules_kernels import wire_row_bytes
from automoe.passes.discard_outputs import discard
from automoe.quantize.formats import E4M3, LINE, SIDE, quantize

_WORD = torch.int64  # wide elements: a gather of rows uses one thread per element
_SCALE_BYTES = 4


def encode_rows(x_TH: Tensor) -> Tensor:
    """Quantize tokens to 8 bits for sending: int64 [T, W], the bytes of codes and scales.

    A row has the e4m3 code of each column, then a float32 scale for each block of 128 columns. A
    block that holds a non-finite number becomes NaN.
    """
    num_rows, hidden = x_TH.shape
    rows = quantize(x_TH, E4M3, LINE)
    lines_TW = x_TH.new_zeros(num_rows, wire_row_bytes(hidden) // _WORD.itemsize, dtype=_WORD)
    codes, scales = _parts(lines_TW, hidden)
    codes.copy_(rows.codes.view(torch.uint8))
    scales.copy_(rows.scales.contiguous().view(torch.uint8))
    return lines_TW


def decode_rows(lines_BW: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """Return hidden states [B, H] in ``dtype`` from rows that ``encode_rows`` made.

    The result is exact in bfloat16 and float32; float16 may round it.

    Args:
        lines_BW: int64; each row has the e4m3 codes of a token, then its float32 scales.
        hidden: number H of columns.
    """
    codes, scales = _parts(lines_BW, hidden)
    return dequantize_rows(codes.view(E4M3), scales.contiguous().view(torch.float32), dtype)


def _parts(lines_BW: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Return uint8 views of the codes [B, H] and of the scales' bytes [B, 4 S] in B rows from ``encode_rows``.

    A row encodes H = ``hidden`` columns; it has S float32 scales, of 4 bytes each.
    """
    scales = -(-hidden // SIDE) * _SCALE_BYTES
    first = -(-hidden // _SCALE_BYTES) * _SCALE_BYTES
    lines = lines_BW.view(torch.uint8)
    return lines[:, :hidden], lines[:, first : first + scales]


def dequantize_rows(codes_BH: Tensor, scales_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 8-bit codes times the scale of each block of 128 columns: [B, H] in ``dtype``.

    ``scales_BS`` has one float32 scale for each of the S blocks of a row.
    """
    x_BH = codes_BH.to(dtype)
    scales_BS = scales_BS.to(dtype)
    whole = x_BH.shape[1] // SIDE
    x_BH[:, : whole * SIDE].unflatten(1, (whole, SIDE)).mul_(scales_BS[:, :whole].unsqueeze(2))
    x_BH[:, whole * SIDE :].mul_(scales_BS[:, whole:])  # the last block may have fewer columns
    return x_BH


def rounded_to_8_bits(x_TH: Tensor) -> Tensor:
    """Return x quantized to 8 bits and decoded again (``encode_rows``); the gradient is unchanged."""
    return decode_arrived(x_TH, encode_rows(x_TH), lambda grad_TH: grad_TH)


def decode_arrived(x_TH: Tensor, lines_BW: Tensor, send_back: Callable[[Tensor], Tensor]) -> Tensor:
    """Decode received 8-bit rows to tokens [B, H], in the dtype of ``x_TH``, which gets their gradient.

    ``lines_BW`` are the received rows, as ``encode_rows`` makes them; ``x_TH`` are the tokens that
    this rank sent. ``send_back`` maps the gradient of the result to the gradient of x.
    """
    return keep_encoded(_DecodeLines.apply(x_TH, lines_BW, send_back), lines_BW)


def keep_encoded(x_BH: Tensor, lines_BW: Tensor) -> Tensor:
    """Return ``x_BH``; operations that save it for their backward keep ``lines_BW`` instead.

    These are x encoded in 8 bits (``encode_rows``), which the backward decodes. This holds inside
    ``automoe.passes.discard_outputs.discard_scope``; elsewhere operations save x itself.
    """
    discard(x_BH, decode_rows, lines_BW, x_BH.shape[1], x_BH.dtype)
    return x_BH


class _DecodeLines(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, lines_BW, send_back: Callable[[Tensor], Tensor]):
        ctx.send_back = send_back
        return decode_rows(lines_BW, x_TH.shape[1], x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BH):
        return ctx.send_back(grad_BH), None, None
