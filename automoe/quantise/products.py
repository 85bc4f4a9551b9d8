"""Matrix products of quantised operands, accumulated in float32: torch's kernels on CUDA, an emulation elsewhere.

All are written ``a @ b.T``: both operands lie along the summed dim, which is how Hopper multiplies 8-bit numbers.
The emulation multiplies the dequantised operands in float32. That is exact but for the order of the sum, so it is
what tests hold the kernels to, and what a CPU gets: no faster than float32, and the same numbers as on a GPU.
Shapes: M and N rows of the operands, K summed, E experts, R rows sorted by expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from automoe.errors import BackendError
from automoe.quantise.formats import BLOCK, LINE, SIDE, WHOLE, Quantised, dequantise

_RECIPES = {WHOLE: "TensorWise", LINE: "BlockWise1x128", BLOCK: "BlockWise128x128"}
_KERNEL_STEP = 16  # bytes: what torch's kernels want K and N to be multiples of


def scaled_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] @ b [N, K].T -> [M, N] in ``dtype``. Both in lines, in lines and blocks, or each under one scale."""
    if a.codes.is_cuda:
        return _scaled_mm(a, b, dtype)
    return (dequantise(a) @ dequantise(b).T).to(dtype)


def _scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
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


def _padded(q: Quantised, step: int) -> Quantised:
    """Zeros up to multiples of ``step`` on both dims, which change no sum; scales are of whole tiles already."""
    rows, cols = q.codes.shape
    more_rows, more_cols = -rows % step, -cols % step
    if not more_rows and not more_cols:
        return q
    codes = F.pad(q.codes.view(torch.uint8), (0, more_cols, 0, more_rows)).view(q.codes.dtype)
    scales = F.pad(q.scales, (0, 0, 0, more_rows), value=1.0) if q.tile == LINE else q.scales
    return Quantised(codes, scales, q.tile)


def _kernel_scales(q: Quantised) -> torch.Tensor:
    """Scales as ``scaled_mm`` wants them: those of lines by columns, those of blocks turned, in steps of four."""
    if q.tile == WHOLE:
        return q.scales.view(1)
    if q.tile == LINE:
        return q.scales.T.clone(memory_format=torch.contiguous_format).T
    across = q.scales.shape[1]
    return F.pad(q.scales, (0, -across % 4), value=1.0).T


def grouped_product(a: Quantised, b: Quantised, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a [R, K] @ b[e] [E, N, K].T, each row by its expert's -> [R, N]; rows past the last offset may hold anything.

    Args:
        a: in lines, or under one scale.
        b: in blocks, or under one scale an expert.
        offsets: [E] int32, end of each expert's rows.

    Raises:
        BackendError: blocks on CUDA.
    """
    if not a.codes.is_cuda:
        return F.grouped_mm(dequantise(a), dequantise(b).transpose(-2, -1), offs=offsets).to(dtype)
    _refuse_blocks(a)
    return _scaled_grouped_mm(
        a.codes,
        b.codes.transpose(-2, -1),
        a.scales.view(1).expand(a.codes.shape[0]),
        b.scales.view(-1, 1).expand(b.codes.shape[:2]),
        offsets,
        dtype,
    )


def grouped_weight_product(
    a: Quantised, b: Quantised, offsets: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """a [M, R] @ b [N, R].T over each expert's columns -> [E, M, N].

    Args:
        a, b: in lines that no two experts share, or under one scale.
        offsets: [E] int32, end of each expert's columns, multiples of 16 as kernels want them; no expert is empty.

    Raises:
        BackendError: lines on CUDA.
    """
    if not a.codes.is_cuda:
        return F.grouped_mm(dequantise(a), dequantise(b).T, offs=offsets).to(dtype)
    _refuse_blocks(a)
    experts = offsets.numel()
    scale_a, scale_b = (q.scales.view(1).expand(experts * q.codes.shape[0]) for q in (a, b))
    return _scaled_grouped_mm(a.codes, b.codes.T, scale_a, scale_b, offsets, dtype)


def _scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One scale a row, all of a matrix alike: the one kind that torch's kernel for Hopper knows. Its result is bf16."""
    by_row = F.ScalingType.RowWise
    scale_a, scale_b = (s.clone(memory_format=torch.contiguous_format) for s in (scale_a, scale_b))
    out = F.scaled_grouped_mm(
        a, b, scale_a, by_row, scale_b, by_row, offs=offsets, output_dtype=torch.bfloat16
    )
    return out.to(dtype)


def _refuse_blocks(q: Quantised) -> None:
    if q.tile != WHOLE:
        raise BackendError(
            "train.fp8=blockwise: torch has no grouped product with block scales for Hopper. Set "
            "train.fp8=tensorwise or delayed, which have one, or run a model without routed experts"
        )
