"""Experts as grouped matrix products, with a backward that keeps little and copies little.

Shapes: R rows sorted by expert, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from automoe.moe.activation import SWIGLU, Activation, row_blocks

Scales = torch.Tensor | None


class GroupedProducts(Protocol):
    """The three products of one weight [E, N, K] of all experts; offsets [E] int32 are the ends of their rows.

    Each operand may have scales, which are found once and then given to each product of it. Finding them may be a
    collective, so it is done where a rank has no rows too; products are not.
    """

    def scales(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> tuple[Scales, Scales]:
        """Of x [R, K] and of the weight."""

    def gradient_scales(self, grad: torch.Tensor, offsets: torch.Tensor) -> Scales:
        """Of grad [R, N]."""

    def out(
        self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, of_x: Scales, of_weight: Scales
    ) -> torch.Tensor:
        """x [R, K] -> [R, N]: each row by its expert's weight, transposed."""

    def grad_rows(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        of_grad: Scales,
        of_weight: Scales,
    ) -> torch.Tensor:
        """grad [R, N] -> [R, K]: each row by its expert's weight."""

    def grad_weight(
        self, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, of_grad: Scales, of_x: Scales
    ) -> torch.Tensor:
        """grad [R, N], x [R, K] -> [E, N, K]: over each expert's rows."""


class _InOwnDtype:
    def scales(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> tuple[None, None]:
        return None, None

    def gradient_scales(self, grad: torch.Tensor, offsets: torch.Tensor) -> None:
        return None

    def out(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *scales: Scales) -> torch.Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    def grad_rows(
        self, grad: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *scales: Scales
    ) -> torch.Tensor:
        return F.grouped_mm(grad, weight, offs=offsets)

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, *scales: Scales) -> torch.Tensor:
        return F.grouped_mm(grad.transpose(0, 1), x, offs=offsets)


IN_OWN_DTYPE = _InOwnDtype()


class _GroupedExperts(torch.autograd.Function):
    """probs * (down(activation(gate, up)) + b_down) of gathered rows; w_gate_up is [E, 2I, H] here.

    Kept for the backward beside the arguments: the [R, 2I] gate and up alone. The gathered rows [R, H] are
    gathered again, the activation [R, I] is computed again.
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        gather_idx: torch.Tensor,
        offsets: torch.Tensor,
        probs: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        b_gate_up: torch.Tensor | None,
        b_down: torch.Tensor | None,
        activation: Activation,
        up_products: GroupedProducts,
        down_products: GroupedProducts,
    ) -> torch.Tensor:
        ctx.activation, ctx.products = activation, (up_products, down_products)
        args = (x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down)
        rows = x.index_select(0, gather_idx)
        of_x, of_up = up_products.scales(rows, w_gate_up, offsets)
        if gather_idx.shape[0] == 0:
            # No token reached this rank. Kernels need not take empty operands; autograd still comes by.
            of_act, of_down = down_products.scales(x.new_empty(0, w_down.shape[-1]), w_down, offsets)
            ctx.save_for_backward(*args, x.new_empty(0), of_x, of_up, of_act, of_down)
            return x.new_empty(0, x.shape[1])
        gate_up = up_products.out(rows, w_gate_up, offsets, of_x, of_up)
        del rows
        if b_gate_up is not None:
            gate_up += of_each_row(b_gate_up, offsets, gate_up.shape[0])
        gate, up = gate_up.chunk(2, dim=-1)
        scale = probs.unsqueeze(1).to(x.dtype)
        act = activation(gate, up).mul_(scale).contiguous()
        of_act, of_down = down_products.scales(act, w_down, offsets)
        ctx.save_for_backward(*args, gate_up, of_x, of_up, of_act, of_down)
        out = down_products.out(act, w_down, offsets, of_act, of_down)
        return out if b_down is None else out.addcmul_(of_each_row(b_down, offsets, out.shape[0]), scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        *args, gate_up, of_x, of_up, of_act, of_down = ctx.saved_tensors
        x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down = args
        up_products, down_products = ctx.products
        grad_out = grad_out.contiguous()  # grouped_mm refuses expanded gradients
        of_grad = down_products.gradient_scales(grad_out, offsets)
        if gather_idx.shape[0] == 0:  # zeros and not None: all ranks must reduce the same gradients
            up_products.gradient_scales(x.new_empty(0, w_gate_up.shape[1]), offsets)
            trained = (x, probs, w_gate_up, w_down, b_gate_up, b_down)
            zeros = [None if tensor is None else torch.zeros_like(tensor) for tensor in trained]
            return zeros[0], None, None, *zeros[1:], None, None, None
        gate, up = gate_up.chunk(2, dim=-1)
        scale = probs.unsqueeze(1).to(x.dtype)

        # Of probs * activation.
        grad_act = down_products.grad_rows(grad_out, w_down, offsets, of_grad, of_down)
        act = torch.empty_like(grad_act)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        grad_probs = torch.empty_like(probs)
        for block in row_blocks(*act.shape, act.device):
            ctx.activation.backward(
                gate[block],
                up[block],
                scale[block],
                grad_act[block],
                act[block],
                grad_gate[block],
                grad_up[block],
                grad_probs[block],
            )
        grad_w_down = down_products.grad_weight(grad_out, act, offsets, of_grad, of_act)
        del act, grad_act
        grad_b_down = None
        if b_down is not None:
            grad_b_down = sum_by_expert(grad_out * scale, offsets)
            products = grad_out * of_each_row(b_down, offsets, grad_out.shape[0])
            grad_probs += products.sum(-1, dtype=probs.dtype)
            del products
        grad_b_gate_up = None if b_gate_up is None else sum_by_expert(grad_gate_up, offsets)

        of_grad = up_products.gradient_scales(grad_gate_up, offsets)
        rows = x.index_select(0, gather_idx)
        grad_w_gate_up = up_products.grad_weight(grad_gate_up, rows, offsets, of_grad, of_x)
        del rows
        grad_rows = up_products.grad_rows(grad_gate_up, w_gate_up, offsets, of_grad, of_up)
        grad_x = torch.zeros_like(x).index_add_(0, gather_idx, grad_rows)
        return (
            grad_x,
            None,
            None,
            grad_probs,
            grad_w_gate_up,
            grad_w_down,
            grad_b_gate_up,
            grad_b_down,
            None,
            None,
            None,
        )


def of_each_row(bias: torch.Tensor, offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[E, N] -> [R, N], to each row what belongs to its expert; rows past the last offset get the last one's."""
    row = torch.arange(num_rows, dtype=offsets.dtype, device=offsets.device)
    expert = torch.searchsorted(offsets, row, right=True).clamp_(max=bias.shape[0] - 1)
    return bias.index_select(0, expert)


def sum_by_expert(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[R, N] -> [E, N] sums over each expert's rows; those past the last offset are left out.

    A product with ones: accumulated wide, in a fixed order, without atomics.
    """
    step = 16 // rows.element_size()  # grouped_mm takes multiples of 16 bytes
    num_cols = rows.shape[1]
    if missing := -num_cols % step:  # else it would be a copy for nothing
        rows = F.pad(rows, (0, missing))
    return grouped_mm(rows.transpose(0, 1), rows.new_ones(rows.shape[0], step), offsets)[:, :num_cols, 0]


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``torch.nn.functional.grouped_mm``, and in float64, which that has not, product by product.

    a [R, K], b [E, K, N] -> [R, N], rows past the last offset may hold anything; a [M, R], b [R, N] -> [E, M, N].
    """
    if a.dtype != torch.float64:
        return F.grouped_mm(a, b, offs=offsets)
    ends = offsets.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if b.dim() == 2:
        return torch.stack([a[:, span] @ b[span] for span in spans])
    out = a.new_empty(a.shape[0], b.shape[-1])
    for span, each in zip(spans, b, strict=True):
        out[span] = a[span] @ each
    return out


def grouped_mm_experts(
    x: torch.Tensor,
    gather_idx: torch.Tensor,
    offsets: torch.Tensor,
    probs: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
    up_products: GroupedProducts = IN_OWN_DTYPE,
    down_products: GroupedProducts = IN_OWN_DTYPE,
) -> torch.Tensor:
    """Products of ``torch.nn.functional.grouped_mm``; float32, bfloat16 and float16, on CPU and GPU.

    Arguments and result as ``automoe.moe.experts`` says; ``up_products`` and ``down_products`` are those of
    w_gate_up and of w_down. Rows past the last offset are not computed: their
    output, and what they add to the gradients of x and probs, is whatever memory held.
    """
    bias = None if b_gate_up is None else b_gate_up.flatten(1, 2)
    return _GroupedExperts.apply(
        x,
        gather_idx,
        offsets,
        probs,
        w_gate_up.flatten(1, 2),
        w_down,
        bias,
        b_down,
        activation,
        up_products,
        down_products,
    )
