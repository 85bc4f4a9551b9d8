"""``moe.experts=quack``: the experts composed from quack-kernels' products (CuTe DSL, Hopper and later).

The calls follow ``quack.gemm_interface`` of quack-kernels 0.3.11 as published in its sources; they have not been
run on a GPU by this project. As in ``automoe.kernels`` rows are gathered by the products that read them, and
what is kept for the backward beside the arguments is gate and up before the activation, here side by side
(g0, u0, g1, u1, ...). No autotuning: it would start over with every new number of rows.

Shapes: N rows to read from, R computed rows, E experts of this rank, H hidden, I expert width.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from automoe.errors import BackendError
from automoe.moe.activation import SWIGLU, Activation
from automoe.moe.experts import ExpertFn

# Of the epilogue that computes gradients: it packs a gate and an up into 32 bits.
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = 9


def experts() -> ExpertFn:
    """See ``automoe.moe.experts`` for the arguments and the result; SwiGLU without biases, bfloat16 and float16.

    Rows past the last offset are not computed: their output, and what they add to the gradients of x and probs,
    is whatever memory held. Gradients of gathered rows are added up by torch, on CUDA with atomics.

    Raises:
        BackendError: quack does not import, or the GPU is older than Hopper; names the backend that there is.
    """
    try:
        ops = import_module("quack.gemm_interface")
    except Exception as error:  # CuTe DSL raises all kinds where a driver or a library is not to its liking
        raise BackendError(
            f"moe.experts=quack: quack does not import ({type(error).__name__}: {error}). Install quack-kernels "
            "0.3.11, or set moe.experts=grouped_mm"
        ) from error
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < MIN_CAPABILITY:
        raise BackendError(
            f"moe.experts=quack has kernels for compute capability {MIN_CAPABILITY}.0 and later, and this GPU has "
            f"{torch.cuda.get_device_capability()}. Set moe.experts=grouped_mm"
        )
    return _Experts(ops)


class _Experts:
    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __call__(
        self,
        x: torch.Tensor,
        gather_idx: torch.Tensor,
        offsets: torch.Tensor,
        probs: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        activation: Activation = SWIGLU,
    ) -> torch.Tensor:
        if b_gate_up is not None or b_down is not None or activation is not SWIGLU:
            raise BackendError("moe.experts=quack has SwiGLU experts without biases alone. Set moe.experts=grouped_mm")
        if x.dtype not in DTYPES:
            raise BackendError(
                f"moe.experts=quack computes in bfloat16 and float16, and the rows are {x.dtype}. Set "
                "moe.experts=grouped_mm"
            )
        return _QuackExperts.apply(self._ops, x, gather_idx, offsets, probs, w_gate_up.flatten(1, 2), w_down)


class _QuackExperts(torch.autograd.Function):
    """probs * down(silu(gate) * up) of gathered rows; w_gate_up is [E, 2I, H] here, gates first."""

    @staticmethod
    def forward(ctx, ops, x, gather_idx, offsets, probs, w_gate_up, w_down):
        ctx.ops = ops
        x, w_gate_up, w_down = x.contiguous(), w_gate_up.contiguous(), w_down.contiguous()
        # Kernels read these in groups of four: copies, since a view may begin between two groups.
        ends = F.pad(offsets.int(), (1, 0))  # [E + 1], from 0
        rows = gather_idx.to(torch.int32, copy=True)
        if gather_idx.shape[0] == 0:  # kernels need not take empty operands; autograd still comes by
            ctx.save_for_backward(x, gather_idx, rows, ends, probs, w_gate_up, w_down, x.new_empty(0))
            return x.new_empty(0, x.shape[1])
        gate_up, act = ops.gemm_gated(
            x,
            w_gate_up.mT,
            activation="swiglu",
            cu_seqlens_m=ends,
            A_idx=rows,
            dynamic_scheduler=False,
            tuned=False,
            concat_layout=("B",),
        )
        ctx.save_for_backward(x, gather_idx, rows, ends, probs, w_gate_up, w_down, gate_up)
        act.mul_(probs.unsqueeze(1))
        return _product(ops, act, w_down.mT, cu_seqlens_m=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, gather_idx, rows, ends, probs, w_gate_up, w_down, gate_up = ctx.saved_tensors
        if gather_idx.shape[0] == 0:  # zeros and not None: all ranks must reduce the same gradients
            grads = [torch.zeros_like(tensor) for tensor in (x, probs, w_gate_up, w_down)]
            return None, grads[0], None, None, *grads[1:]
        ops, grad_out = ctx.ops, grad_out.contiguous()
        # One product and its epilogue: the gradient of gate and up, the weighted activation once more, and
        # for the gradient of probs each row's product of the activation with its own gradient.
        grad_gate_up, act, grad_probs = ops.gemm_dgated(
            grad_out,
            w_down,
            gate_up,
            activation="swiglu",
            colvec_scale=probs.to(torch.promote_types(probs.dtype, torch.float32), copy=True),
            colvec_reduce=True,
            cu_seqlens_m=ends,
            dynamic_scheduler=False,
            tuned=False,
        )
        grad_w_down = _product(ops, grad_out.mT, act, cu_seqlens_k=ends)
        # Transposed, because it is the left operand whose rows can be gathered. Gates and ups lie side by side
        # in grad_gate_up and one behind the other in the result, along the dim that is not contiguous.
        grad_w_gate_up = torch.empty_like(w_gate_up)
        _product(
            ops,
            x.mT,
            grad_gate_up,
            out=grad_w_gate_up.mT,
            cu_seqlens_k=ends,
            A_idx=rows,
            concat_layout=("out",),
        )
        grad_rows = _product(ops, grad_gate_up, w_gate_up, cu_seqlens_m=ends, concat_layout=("B",))
        grad_x = torch.zeros_like(x).index_add_(0, gather_idx, grad_rows)
        return None, grad_x, None, None, grad_probs.to(probs.dtype), grad_w_gate_up, grad_w_down


def _product(ops: Any, left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
    """Each expert's ``left @ right``, over its rows of left (cu_seqlens_m) or of what is summed (cu_seqlens_k)."""
    return ops.gemm(left, right, dynamic_scheduler=False, tuned=False, **options)
