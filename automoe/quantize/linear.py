"""Float8 matrix products of a linear layer: torch's kernels on CUDA, an emulation elsewhere.

The emulation multiplies the dequantized operands in float32. It is exact except for the rounding of
float32 sums, and it is no faster than a float32 product. Hopper gets the same codes and scales, but
its float8 units accumulate products with fewer bits than float32: tests/gpu/test_device_fp8.py
allows its results an error of 2e-3 of their norm (5e-3 in bfloat16).

Shapes: T tokens in any leading dims, K input and N output features. A product of two operands has M
and N rows and sums over K.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automoe.quantize.formats import BLOCK, LINE, SIDE, WHOLE, Quantized, dequantize, transposed
from automoe.quantize.scaling import GRAD, Scaling, X

_RECIPES = {WHOLE: "TensorWise", LINE: "BlockWise1x128", BLOCK: "BlockWise128x128"}
_KERNEL_STEP = 16  # bytes; torch's kernels need K and N to be multiples of this.


class _Product(torch.autograd.Function):
    """Autograd function (x, weight, scaling) -> x @ weight.T in float8; it saves both unquantized.

    ``scaling`` is the rule that quantizes the operands, such as ``Tensorwise``. The backward pass
    quantizes x and weight again, except a weight whose codes are in ``scaling.cached``. Other
    operations save x anyway (other products with the same input, attention's backward, the router),
    so saved codes would be a second copy. FSDP owns the weight and may free it between forward and
    backward.
    """

    @staticmethod
    def forward(ctx, x, weight, scaling: Scaling):
        x_scales = scaling.scales(x.flatten(0, -2), X)
        weight_scales = scaling.weight_scales(weight)
        rows = scaling.quantize(x.flatten(0, -2), x_scales, X)
        columns = scaling.quantize_weight(weight, weight_scales)
        ctx.save_for_backward(x, weight, x_scales, weight_scales)
        ctx.scaling = scaling
        return scaled_product(rows, columns, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, x_scales, weight_scales = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        scaling = ctx.scaling
        grad_scales = scaling.scales(grad, GRAD)
        rows = scaling.quantize(grad, grad_scales, GRAD)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            columns = transposed(scaling.quantize_weight(weight, weight_scales))
            grad_x = scaled_product(rows, columns, grad.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            rows = scaling.gradient_transposed(grad, grad_scales, rows)
            columns = transposed(scaling.quantize(x.flatten(0, -2), x_scales, X))
            grad_weight = scaled_product(rows, columns, weight.dtype)
        return grad_x, grad_weight, None


class QuantizedProduct(nn.Module):
    """``F.linear`` in float8: x [..., K], weight [N, K], bias [N] or None -> [..., N].

    Args:
        scaling: rule that quantizes the operands, such as ``Tensorwise``.
        gradient_hook: function that changes the gradient of the product before the gradient is
            quantized; None leaves the gradient as it is.
    """

    def __init__(
        self, scaling: Scaling, gradient_hook: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.gradient_hook = gradient_hook

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = _Product.apply(x, weight, self.scaling)
        if self.gradient_hook is not None and out.requires_grad:
            out.register_hook(self.gradient_hook)
        return out if bias is None else out + bias


def scaled_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the product a [M, K] @ b [N, K].T of quantized operands as [M, N] in ``dtype``.

    The numbers that share a scale are 1 x 128 in both operands (``LINE``), 1 x 128 in a and 128 x
    128 in b (``BLOCK``), or a whole matrix in both (``WHOLE``). Both operands are contiguous along
    the summed dim, as Hopper's float8 units need.
    """
    if a.codes.is_cuda:
        num_rows, num_cols = len(a.codes), len(b.codes)
        if 0 in (num_rows, num_cols, a.codes.shape[1]):  # Kernels may refuse empty operands.
            return torch.zeros(num_rows, num_cols, dtype=dtype, device=a.codes.device)
        step = _KERNEL_STEP if a.tile == WHOLE else SIDE
        a = _padded(a, step)
        b = _padded(b, step)
        recipe_a, recipe_b = (getattr(F.ScalingType, _RECIPES[q.tile]) for q in (a, b))
        out = F.scaled_mm(
            a.codes, b.codes.T, _kernel_scales(a), recipe_a, _kernel_scales(b), recipe_b, output_dtype=dtype
        )  # fmt: skip
        return out.narrow(0, 0, num_rows).narrow(1, 0, num_cols)
    wide = torch.promote_types(dtype, torch.float32)  # automoe.verify computes in float64.
    return (dequantize(a).to(wide) @ dequantize(b).to(wide).T).to(dtype)


def _padded(q: Quantized, step: int) -> Quantized:
    """Return ``q`` with both dims of the codes padded with zeros to multiples of ``step``.

    Zeros change no sum. If a scale belongs to 1 x 128 numbers (``LINE``), each new row gets scales
    of one; scales of 128 x 128 blocks or of a whole matrix already cover the padding.
    """
    rows, cols = q.codes.shape
    more_rows = -rows % step
    more_cols = -cols % step
    if not more_rows and not more_cols:
        return q
    codes = F.pad(q.codes.view(torch.uint8), (0, more_cols, 0, more_rows)).view(q.codes.dtype)
    scales = F.pad(q.scales, (0, 0, 0, more_rows), value=1.0) if q.tile == LINE else q.scales
    return Quantized(codes, scales, q.tile)


def _kernel_scales(q: Quantized) -> Tensor:
    """Return the scales of ``q`` in the layout that torch's ``scaled_mm`` reads.

    Scales of 1 x 128 tiles are column-major; scales of 128 x 128 tiles are transposed and padded to
    multiples of 4; the scale of a whole matrix has the shape [1].
    """
    if q.tile == WHOLE:
        return q.scales.view(1)
    if q.tile == LINE:
        return q.scales.T.clone(memory_format=torch.contiguous_format).T
    across = q.scales.shape[1]
    return F.pad(q.scales, (0, -across % 4), value=1.0).T
