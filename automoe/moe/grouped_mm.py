"""Experts as grouped matrix products, with a backward that keeps little and copies little.

Shapes: R rows sorted by expert, E experts, H hidden, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from automoe.blocks import row_blocks


class _GroupedSwiGLU(torch.autograd.Function):
    """probs * down(silu(gate) * up) of gathered rows; w_gate_up is [E, 2I, H] here.

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
    ) -> torch.Tensor:
        if gather_idx.shape[0] == 0:
            # No token reached this rank. Kernels need not take empty operands; autograd still comes by.
            ctx.save_for_backward(x, gather_idx, offsets, probs, w_gate_up, w_down, x.new_empty(0))
            return x.new_empty(0, x.shape[1])
        gate_up = F.grouped_mm(x.index_select(0, gather_idx), w_gate_up.transpose(1, 2), offs=offsets)
        gate, up = gate_up.chunk(2, dim=-1)
        act = F.silu(gate).mul_(up).mul_(probs.unsqueeze(1).to(x.dtype))
        ctx.save_for_backward(x, gather_idx, offsets, probs, w_gate_up, w_down, gate_up)
        return F.grouped_mm(act.contiguous(), w_down.transpose(1, 2), offs=offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):
        x, gather_idx, offsets, probs, w_gate_up, w_down, gate_up = ctx.saved_tensors
        if gather_idx.shape[0] == 0:  # zeros and not None: all ranks must reduce the same gradients
            zeros = [torch.zeros_like(tensor) for tensor in (x, probs, w_gate_up, w_down)]
            return zeros[0], None, None, *zeros[1:]
        grad_out = grad_out.contiguous()  # grouped_mm refuses expanded gradients
        gate, up = gate_up.chunk(2, dim=-1)
        scale = probs.unsqueeze(1).to(x.dtype)

        grad_act = F.grouped_mm(grad_out, w_down, offs=offsets)  # of probs * silu(gate) * up
        act = torch.empty_like(grad_act)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        grad_probs = torch.empty_like(probs)
        for block in row_blocks(*act.shape, act.device):
            silu, grad, into = F.silu(gate[block]), grad_act[block], grad_up[block]
            torch.mul(silu, up[block], out=act[block])
            # ``into`` is scratch until its own value is due; the sum is at least as wide as the products.
            torch.sum(torch.mul(grad, act[block], out=into), -1, dtype=probs.dtype, out=grad_probs[block])
            act[block].mul_(scale[block])
            torch.mul(grad.mul_(scale[block]), silu, out=into)
            torch.ops.aten.silu_backward.grad_input(
                grad.mul_(up[block]), gate[block], grad_input=grad_gate[block]
            )
        grad_w_down = F.grouped_mm(grad_out.transpose(0, 1), act, offs=offsets)
        del act, grad_act

        rows = x.index_select(0, gather_idx)
        grad_w_gate_up = F.grouped_mm(grad_gate_up.transpose(0, 1), rows, offs=offsets)
        del rows
        grad_rows = F.grouped_mm(grad_gate_up, w_gate_up, offs=offsets)
        grad_x = torch.zeros_like(x).index_add_(0, gather_idx, grad_rows)
        return grad_x, None, None, grad_probs, grad_w_gate_up, grad_w_down


def grouped_mm_experts(
    x: torch.Tensor,
    gather_idx: torch.Tensor,
    offsets: torch.Tensor,
    probs: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """Products of ``torch.nn.functional.grouped_mm``; float32, bfloat16 and float16, on CPU and GPU.

    Arguments and result as ``automoe.moe.experts`` says. Rows past the last offset are not computed: their
    output, and what they add to the gradients of x and probs, is whatever memory held.
    """
    return _GroupedSwiGLU.apply(x, gather_idx, offsets, probs, w_gate_up.flatten(1, 2), w_down)
