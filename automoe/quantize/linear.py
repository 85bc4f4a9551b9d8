"""A linear layer's matrix products in 8 bits: torch's kernels on CUDA, an emulation elsewhere.

The emulation multiplies the dequantized operands in float32: exact but for float32's own sums, and
no faster. Hopper gets the same codes and scales, but its 8-bit units keep fewer bits than float32
while they add up products: tests/gpu/test_device_fp8.py allows its results an error of 2e-3 of
their norm (5e-3 in bfloat16). Shapes: T tokens in any leading dims, K input and N output features;
M and N rows of two operands, K summed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.quantize.formats import BLOCK, LINE, SIDE, WHOLE, Quantized, dequantize, transposed
from automoe.quantize.scaling import GRAD, Scaling, W, X

_RECIPES = {WHOLE: "TensorWise", LINE: "BlockWise1x128", BLOCK: "BlockWise128x128"}
_KERNEL_STEP = 16  # bytes: torch's kernels want K and N to be multiples of this


class _Product(torch.autograd.Function):
    """Keeps x and the weight themselves, and quantizes both again in the backward.

    Others keep x anyway (the other products of it, attention's backward, the router), so its codes
    would be a second copy. The weight belongs to FSDP, which may free it in between.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, scaling: Scaling) -> torch.Tensor:
        x_scales, weight_scales = scaling.scales(x.flatten(0, -2), X), scaling.scales(weight, W)
        rows, columns = (
            scaling.quantize(x.flatten(0, -2), x_scales, X),
            scaling.quantize(weight, weight_scales, W),
        )
        ctx.save_for_backward(x, weight, x_scales, weight_scales)
        ctx.scaling = scaling
        return scaled_product(rows, columns, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, weight, x_scales, weight_scales = ctx.saved_tensors
        grad, scaling = grad.reshape(-1, grad.shape[-1]), ctx.scaling
        grad_scales = scaling.scales(grad, GRAD)
        rows = scaling.quantize(grad, grad_scales, GRAD)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            columns = transposed(scaling.quantize(weight, weight_scales, W))
            grad_x = scaled_product(rows, columns, grad.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            rows = scaling.gradient_transposed(grad, grad_scales, rows)
            columns = transposed(scaling.quantize(x.flatten(0, -2), x_scales, X))
            grad_weight = scaled_product(rows, columns, weight.dtype)
        return grad_x, grad_weight, None


class QuantizedProduct(nn.Module):
    """A ``Linear.product`` in 8 bits: x [..., K], weight [N, K], bias [N] or None -> [..., N].

    ``gradient_hook`` changes the gradient of the product, before that is quantized.
    """

    gradient_hook: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.scaling = scaling

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = _Product.apply(x, weight, self.scaling)
        if self.gradient_hook is not None and out.requires_grad:
            out.register_hook(self.gradient_hook)
        return out if bias is None else out + bias


def scaled_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] @ b [N, K].T -> [M, N] in ``dtype``; both in lines, in lines and blocks, or each
    with one scale.

    Both operands lie along the summed dim, since that is how Hopper multiplies 8-bit numbers.
    """
    if a.codes.is_cuda:
        return _scaled_mm(a, b, dtype)
    wide = torch.promote_types(dtype, torch.float32)  # float64 for automoe.verify
    return (dequantize(a).to(wide) @ dequantize(b).to(wide).T).to(dtype)


def _scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    num_rows, num_cols = a.codes.shape[0], b.codes.shape[0]
    if 0 in (num_rows, num_cols, a.codes.shape[1]):  # kernels need not take empty operands
        return torch.zeros(num_rows, num_cols, dtype=dtype, device=a.codes.device)
    step = _KERNEL_STEP if a.tile == WHOLE else SIDE
    a, b = _padded(a, step), _padded(b, step)
    recipe_a, recipe_b = (getattr(F.ScalingType, _RECIPES[q.tile]) for q in (a, b))
    out = F.scaled_mm(
        a.codes, b.codes.T, _kernel_scales(a), recipe_a, _kernel_scales(b), recipe_b, output_dtype=dtype
    )  # fmt: skip
    return out.narrow(0, 0, num_rows).narrow(1, 0, num_cols)


def _padded(q: Quantized, step: int) -> Quantized:
    """Zeros up to multiples of ``step`` on both dims, which change no sum; scales are already those
    of whole tiles."""
    rows, cols = q.codes.shape
    more_rows, more_cols = -rows % step, -cols % step
    if not more_rows and not more_cols:
        return q
    codes = F.pad(q.codes.view(torch.uint8), (0, more_cols, 0, more_rows)).view(q.codes.dtype)
    scales = F.pad(q.scales, (0, 0, 0, more_rows), value=1.0) if q.tile == LINE else q.scales
    return Quantized(codes, scales, q.tile)


def _kernel_scales(q: Quantized) -> torch.Tensor:
    """Scales as ``scaled_mm`` takes them: of lines column by column, of blocks transposed and
    padded to fours."""
    if q.tile == WHOLE:
        return q.scales.view(1)
    if q.tile == LINE:
        return q.scales.T.clone(memory_format=torch.contiguous_format).T
    across = q.scales.shape[1]
    return F.pad(q.scales, (0, -across % 4), value=1.0).T
