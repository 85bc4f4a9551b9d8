"""The matrix product of quantized operands: torch's kernels on CUDA, an emulation elsewhere.

It is written ``a @ b.T``: both operands lie along the summed dim, which is how Hopper multiplies 8-bit numbers.
The emulation multiplies the dequantized operands in float32: exact but for float32's own sums, and no faster than
those. Hopper gets the same codes and scales, but its 8-bit units keep fewer bits than float32 within a run of
products: tests/gpu/test_device_fp8.py allows its results to be 2e-3 of their norm off (5e-3 in bfloat16).
Shapes: M and N rows of the operands, K summed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from automoe.quantize.formats import BLOCK, LINE, SIDE, WHOLE, Quantized, dequantize

_RECIPES = {WHOLE: "TensorWise", LINE: "BlockWise1x128", BLOCK: "BlockWise128x128"}
_KERNEL_STEP = 16  # bytes: what torch's kernels want K and N to be multiples of


def scaled_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] @ b [N, K].T -> [M, N] in ``dtype``. Both in lines, in lines and blocks, or each under one scale."""
    if a.codes.is_cuda:
        return _scaled_mm(a, b, dtype)
    wide = torch.promote_types(dtype, torch.float32)  # in float64 for automoe.verify
    return (dequantize(a).to(wide) @ dequantize(b).to(wide).T).to(dtype)


def _scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    num_rows, num_cols = a.codes.shape[0], b.codes.shape[0]
    if 0 in (num_rows, num_cols, a.codes.shape[1]):  # kernels need not take empty operands
        return torch.zeros(num_rows, num_cols, dtype=dtype, device=a.codes.device)
    step = _KERNEL_STEP if a.tile == WHOLE else SIDE
    a, b = _padded(a, step), _padded(b, step)
    out = F.scaled_mm(
        a.codes,
        b.codes.T,
        _kernel_scales(a),
        getattr(F.ScalingType, _RECIPES[a.tile]),
        _kernel_scales(b),
        getattr(F.ScalingType, _RECIPES[b.tile]),
        output_dtype=dtype,
    )
    return out.narrow(0, 0, num_rows).narrow(1, 0, num_cols)


def _padded(q: Quantized, step: int) -> Quantized:
    """Zeros up to multiples of ``step`` on both dims, which change no sum; scales are of whole tiles already."""
    rows, cols = q.codes.shape
    more_rows, more_cols = -rows % step, -cols % step
    if not more_rows and not more_cols:
        return q
    codes = F.pad(q.codes.view(torch.uint8), (0, more_cols, 0, more_rows)).view(q.codes.dtype)
    scales = F.pad(q.scales, (0, 0, 0, more_rows), value=1.0) if q.tile == LINE else q.scales
    return Quantized(codes, scales, q.tile)


def _kernel_scales(q: Quantized) -> torch.Tensor:
    """Scales as ``scaled_mm`` wants them: those of lines by columns, those of blocks turned, in steps of four."""
    if q.tile == WHOLE:
        return q.scales.view(1)
    if q.tile == LINE:
        return q.scales.T.clone(memory_format=torch.contiguous_format).T
    across = q.scales.shape[1]
    return F.pad(q.scales, (0, -across % 4), value=1.0).T
