"""Expert backend ``moe.experts=quack``: products of quack-kernels (CuTe DSL, Hopper and later).

The calls follow ``quack.gemm_interface`` of quack-kernels 0.3.11 as published in its sources; this
project has not run them on a GPU. As in ``automoe.kernels``, the products gather the rows that they
read. Besides the arguments, only gate and up before the activation are kept for the backward, here
interleaved (g0, u0, g1, u1, ...).

Shapes: T rows to read from, R computed rows, E experts of this rank, H hidden, I expert width, J =
2I.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from automoe.errors import BackendError, import_backend
from automoe.moe.activation import SWIGLU, Activation
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.experts import ExpertFn
from automoe.moe.grouped_mm import zero_gradients
from automoe.moe.row_sums import sum_rows

# Dtypes of the epilogue that computes gradients, which packs a gate and an up into 32 bits.
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = 9
# Autotuning is off: it would start again with every new number of rows.
FIXED = dict(dynamic_scheduler=False, tuned=False)


def experts() -> ExpertFn:
    """Return the expert backend: SwiGLU without biases, in bfloat16 and float16.

    ``automoe.moe.experts`` describes the arguments and the result. Rows past the last offset are
    not computed: their output, and their part in the gradients of x and probs, is uninitialised
    memory. ``sum_rows`` adds up the gradients of gathered rows, in a fixed order.

    Raises:
        BackendError: quack does not import, or the GPU is older than Hopper; the message names the
            available backend.
    """
    remedy = "Install quack-kernels 0.3.11, or set moe.experts=grouped_mm"
    ops = import_backend("quack.gemm_interface", "moe.experts=quack", remedy)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < MIN_CAPABILITY:
        raise BackendError(
            f"moe.experts=quack has kernels for compute capability {MIN_CAPABILITY}.0 and later, and this GPU has "
            f"{torch.cuda.get_device_capability()}. Set moe.experts=grouped_mm"
        )
    return partial(_experts, ops)


def _experts(
    ops: Any,
    x_TH,
    gather_idx_R,
    offsets_E,
    probs_R,
    weights: ExpertWeights,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    if weights.gate_up_proj_bias is not None or activation is not SWIGLU:
        raise BackendError(
            "moe.experts=quack has only SwiGLU experts without biases. Set moe.experts=grouped_mm"
        )
    if x_TH.dtype not in DTYPES:
        raise BackendError(
            f"moe.experts=quack computes in bfloat16 and float16, and the rows are {x_TH.dtype}. Set "
            "moe.experts=grouped_mm"
        )
    matrices = weights.joined()[:2]
    return _QuackExperts.apply(ops, x_TH, gather_idx_R, offsets_E, probs_R, *matrices)


class _QuackExperts(torch.autograd.Function):
    """Autograd function of probs * down(silu(gate) * up) of gathered rows; J = 2I, gates first."""

    @staticmethod
    def forward(ctx, ops, x_TH, gather_idx_R, offsets_E, probs_R, gate_up_proj_EJH, down_proj_EHI):
        ctx.ops = ops
        x_TH = x_TH.contiguous()
        gate_up_proj_EJH = gate_up_proj_EJH.contiguous()
        down_proj_EHI = down_proj_EHI.contiguous()
        # Kernels read these in groups of four: copies, since a view may begin between two groups.
        ends = F.pad(offsets_E.int(), (1, 0))  # [E + 1], from 0
        row_idx_R = gather_idx_R.to(torch.int32, copy=True)
        args = x_TH, gather_idx_R, offsets_E, probs_R, gate_up_proj_EJH, down_proj_EHI
        # kernels need not take empty operands, but the backward will still run
        if gather_idx_R.shape[0] == 0:
            ctx.save_for_backward(*args, row_idx_R, ends, x_TH.new_empty(0))
            return x_TH.new_empty(0, x_TH.shape[1])
        gate_up_RJ, act_RI = ops.gemm_gated(
            x_TH,
            gate_up_proj_EJH.mT,
            activation="swiglu",
            cu_seqlens_m=ends,
            A_idx=row_idx_R,
            concat_layout=("B",),
            **FIXED,
        )
        ctx.save_for_backward(*args, row_idx_R, ends, gate_up_RJ)
        act_RI.mul_(probs_R.unsqueeze(1))
        return _product(ops, act_RI, down_proj_EHI.mT, cu_seqlens_m=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_RH):
        *args, row_idx_R, ends, gate_up_RJ = ctx.saved_tensors
        x_TH, gather_idx_R, _, probs_R, gate_up_proj_EJH, down_proj_EHI = args
        if gather_idx_R.shape[0] == 0:
            return None, *zero_gradients(*args)
        ops = ctx.ops
        grad_out_RH = grad_out_RH.contiguous()
        # One product and its epilogue compute the gradient of gate and up, the weighted activation
        # again, and the gradient of probs: each row's product of activation and its gradient.
        grad_gate_up_RJ, act_RI, grad_probs_R = ops.gemm_dgated(
            grad_out_RH,
            down_proj_EHI,
            gate_up_RJ,
            activation="swiglu",
            colvec_scale=probs_R.to(torch.promote_types(probs_R.dtype, torch.float32), copy=True),
            colvec_reduce=True,
            cu_seqlens_m=ends,
            **FIXED,
        )
        grad_w_down_EHI = _product(ops, grad_out_RH.mT, act_RI, cu_seqlens_k=ends)
        # Transposed, because only the rows of the left operand can be gathered. Gates and ups are
        # interleaved in grad_gate_up. In the result they are halves of the dim that is not
        # contiguous.
        grad_w_gate_up_EJH = torch.empty_like(gate_up_proj_EJH)
        out = grad_w_gate_up_EJH.mT
        halves = ("out",)
        _product(
            ops,
            x_TH.mT,
            grad_gate_up_RJ,
            out=out,
            cu_seqlens_k=ends,
            A_idx=row_idx_R,
            concat_layout=halves,
        )
        grad_rows_RH = _product(
            ops, grad_gate_up_RJ, gate_up_proj_EJH, cu_seqlens_m=ends, concat_layout=("B",)
        )
        grad_x_TH = sum_rows(grad_rows_RH, gather_idx_R, x_TH.shape[0])
        return (
            None,
            grad_x_TH,
            None,
            None,
            grad_probs_R.to(probs_R.dtype),
            grad_w_gate_up_EJH,
            grad_w_down_EHI,
        )


def _product(ops: Any, left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return each expert's ``left @ right``.

    ``cu_seqlens_m`` bounds the experts' rows of left, ``cu_seqlens_k`` their parts of the summed
    dim.
    """
    return ops.gemm(left, right, **options, **FIXED)
