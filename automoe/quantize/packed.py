"""Packed frozen weights (``lora.base``): fp8 or nf4 blocks, dequantized for each product.

Codes and scales are one uint8 tensor [..., rows, blocks, bytes]. A block is 128 float8 codes of a
row (``fp8``) or 64 codes of 4 bits (``nf4``, arXiv 2305.14314), followed by its float32 scale. The
packed tensor has the dims of the matrix, so sharding between rows or between blocks cuts codes and
scales alike. FSDP's mixed precision does not cast uint8.
"""

from __future__ import annotations

import logging
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.config.facts import BASE_BLOCKS
from automoe.errors import import_backend
from automoe.quantize.formats import E4M3

_KINDS = {size: kind for kind, (_, size) in BASE_BLOCKS.items()}
_CHUNK = 1 << 24  # So many numbers are widened at once, which bounds the scratch memory.
_SCALE = 4  # bytes


def is_packed(weight: Tensor) -> bool:
    """Return True if ``weight`` holds a quantized matrix as blocks of bytes (uint8)."""
    return weight.dtype == torch.uint8


def base_of(weight: Tensor) -> str:
    """Return the format of a weight stored as blocks of bytes: ``fp8`` (132 bytes) or ``nf4`` (36)."""
    return _KINDS[weight.shape[-1]]


def block_size(weight: Tensor) -> int:
    """Return how many numbers a block of a quantized ``weight`` holds: 128 in fp8, 64 in nf4."""
    return BASE_BLOCKS[base_of(weight)][0]


def pack_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Join fp8 codes and their scales to blocks of bytes, uint8 [R, ceil(C / 128), 132].

    Args:
        codes: [R, C] float8_e4m3fn.
        scales: [R, ceil(C / 128)] of any floating-point dtype.
    """
    size, _ = BASE_BLOCKS["fp8"]
    whole = F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % size)).unflatten(1, (-1, size))
    return _joined(whole, scales.to(torch.float32))


def pack_nf4(numbers: Tensor) -> Tensor:
    """Quantize float32 [..., R, C] to nf4 blocks of bytes, uint8 [..., R, ceil(C / 64), 36].

    bitsandbytes rounds the numbers, on the device of ``numbers``.

    Raises:
        BackendError: bitsandbytes is not installed.
    """
    size, _ = BASE_BLOCKS["nf4"]
    whole = F.pad(numbers, (0, -numbers.shape[-1] % size)).unflatten(-1, (-1, size)).contiguous()
    codes, state = _bitsandbytes().quantize_4bit(whole, blocksize=size, quant_type="nf4")
    return _joined(codes.view(*whole.shape[:-1], size // 2), state.absmax.view(whole.shape[:-1]))


def _joined(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat((codes, scales.contiguous().unsqueeze(-1).view(torch.uint8)), dim=-1)


@torch.no_grad()
def unpack(weight: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks of bytes to [..., R, columns]; return other tensors as they are.

    Each number is rounded from float32 once.

    Args:
        weight: blocks [..., R, blocks, bytes] (uint8; 132 bytes are fp8, 36 are nf4), or a tensor
            that is not quantized.
        columns: columns of the matrix, without the padding of the last block.
        dtype: dtype of the result.
    """
    if not is_packed(weight):
        return weight
    wide = torch.empty(*weight.shape[:-2], columns, dtype=dtype, device=weight.device)
    if wide.numel() == 0:
        return wide
    step = max(1, _CHUNK // columns)
    for rows, into in zip(
        weight.flatten(0, -3).split(step), wide.flatten(0, -2).split(step), strict=True
    ):
        into.copy_(_numbers(rows, dtype).flatten(1)[:, :columns])
    return wide


def _numbers(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize fp8 or nf4 [R, blocks, bytes] to [R, blocks, numbers per block].

    The result of nf4 is in ``dtype`` if that is a 16-bit type; all other results are float32.
    """
    codes = blocks[..., :-_SCALE]
    scales = blocks[..., -_SCALE:].contiguous().view(torch.float32)
    if base_of(blocks) == "fp8":
        return codes.view(E4M3).to(torch.float32) * scales
    known = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    library = _bitsandbytes()
    state = library.QuantState(
        scales.flatten(), shape, dtype=known, blocksize=shape[-1], quant_type="nf4"
    )
    return library.dequantize_4bit(codes.contiguous().view(-1, 1), state)


def _bitsandbytes() -> ModuleType:
    # bitsandbytes warns about CPU kernels that this module does not call.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return import_backend(
        "bitsandbytes.functional",
        "lora.base=nf4",
        "pip install bitsandbytes, or set lora.base=weights",
    )


class _PackedProduct(torch.autograd.Function):
    """Autograd function (x, weight, bias): ``F.linear`` of a quantized, frozen weight.

    The weight is a uint8 tensor of fp8 or nf4 blocks, saved as it is, and gets no gradient. The
    backward pass dequantizes it again.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        ctx.columns = x.shape[-1]
        return F.linear(x, unpack(weight, x.shape[-1], x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        grad_x = grad @ unpack(weight, ctx.columns, grad.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, None, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear`` of a weight [O, I], which may be quantized to blocks of bytes.

    Shapes: x [..., I], bias [O] or None -> [..., O].
    """
    product = _PackedProduct.apply if is_packed(weight) else F.linear
    return product(x, weight, bias)
