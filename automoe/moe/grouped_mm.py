"""Experts as grouped matrix products, with a backward that keeps little and copies little.

Shapes: R rows sorted by expert, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from automoe.blocks import row_blocks
from automoe.moe.activation import SWIGLU, Activation


class GroupedProducts(Protocol):
    """The three products of one weight [E, N, K] of all experts; offsets [E] int32 are the ends of their rows."""

    def out(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """x [R, K] -> [R, N]: each row by its expert's weight, transposed."""

    def grad_rows(self, grad: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """grad [R, N] -> [R, K]: each row by its expert's weight."""

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """grad [R, N], x [R, K] -> [E, N, K]: over each expert's rows."""


class _InOwnDtype:
    def out(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    def grad_rows(self, grad: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(grad, weight, offs=offsets)

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
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
        if gather_idx.shape[0] == 0:
            # No token reached this rank. Kernels need not take empty operands; autograd still comes by.
            ctx.save_for_backward(*args, x.new_empty(0))
            return x.new_empty(0, x.shape[1])
        gate_up = up_products.out(x.index_select(0, gather_idx), w_gate_up, offsets)
        if b_gate_up is not None:
            gate_up += of_each_row(b_gate_up, offsets, gate_up.shape[0])
        gate, up = gate_up.chunk(2, dim=-1)
        scale = probs.unsqueeze(1).to(x.dtype)
        act = activation(gate, up).mul_(scale)
        ctx.save_for_backward(*args, gate_up)
        out = down_products.out(act.contiguous(), w_down, offsets)
        return out if b_down is None else out.addcmul_(of_each_row(b_down, offsets, out.shape[0]), scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, gate_up = ctx.saved_tensors
        if gather_idx.shape[0] == 0:  # zeros and not None: all ranks must reduce the same gradients
            trained = (x, probs, w_gate_up, w_down, b_gate_up, b_down)
            zeros = [None if tensor is None else torch.zeros_like(tensor) for tensor in trained]
            return zeros[0], None, None, *zeros[1:], None, None, None
        up_products, down_products = ctx.products
        grad_out = grad_out.contiguous()  # grouped_mm refuses expanded gradients
        gate, up = gate_up.chunk(2, dim=-1)
        scale = probs.unsqueeze(1).to(x.dtype)

        grad_act = down_products.grad_rows(grad_out, w_down, offsets)  # of probs * activation
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
        grad_w_down = down_products.grad_weight(grad_out, act, offsets)
        del act, grad_act
        grad_b_down = None
        if b_down is not None:
            grad_b_down = sum_by_expert(grad_out * scale, offsets)
            products = grad_out * of_each_row(b_down, offsets, grad_out.shape[0])
            grad_probs += products.sum(-1, dtype=probs.dtype)
            del products
        grad_b_gate_up = None if b_gate_up is None else sum_by_expert(grad_gate_up, offsets)

        rows = x.index_select(0, gather_idx)
        grad_w_gate_up = up_products.grad_weight(grad_gate_up, rows, offsets)
        del rows
        grad_rows = up_products.grad_rows(grad_gate_up, w_gate_up, offsets)
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
    ones = rows.new_ones(rows.shape[0], 16 // rows.element_size())  # the narrowest that grouped_mm takes
    return F.grouped_mm(rows.transpose(0, 1), ones, offs=offsets)[..., 0]


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
