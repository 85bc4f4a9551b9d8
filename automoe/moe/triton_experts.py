"""Expert backend ``moe.experts=triton``: kernels that need no permuted copy of the tokens.

For the backward they save their arguments, and gate and up before the activation, [R, 2I]. Shapes:
T tokens, R computed rows sorted by expert, E experts of this rank, I expert width, H hidden.
"""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch.autograd.function import once_differentiable

from automoe.errors import BackendError
from automoe.kernels import launches
from automoe.kernels.activation import SWIGLU, Activation, ClampedSwiGLU
from automoe.kernels.served import check_served
from automoe.kernels.tiling import row_tiles
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.grouped_mm import grouped_mm_experts, repeat_by_expert, sum_by_expert

# Only Hopper and datacenter Blackwell have the 227 KB of shared memory that the blocks need.
_CAPABILITIES = (9, 10)


def check_gpu() -> None:
    """Raise ``BackendError`` for a GPU whose major compute capability is neither 9 nor 10."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in _CAPABILITIES:
        raise BackendError(
            "moe.experts=triton is written for compute capabilities 9 and 10, Hopper and datacenter Blackwell, and "
            f"this GPU has {torch.cuda.get_device_capability()}. Set moe.experts=grouped_mm"
        )


def triton_experts(
    x_TH, gather_idx_R, offsets_E, probs_R, weights: ExpertWeights, activation: Activation = SWIGLU
) -> torch.Tensor:
    """Return probs * expert(x) of R rows, sorted by expert: [R, H], on CUDA in bfloat16, float16 or float32.

    Rows past the last offset are not computed: their output and their gradient of probs are
    uninitialised memory. They add nothing to the gradient of x.

    Args:
        x_TH: rows to read from, such as a rank's tokens.
        gather_idx_R: row of x that each of the R computed rows reads.
        offsets_E: end of each expert's rows among the R.
        probs_R: routing weight of each computed row.
        weights: matrices and biases of this rank's experts.
        activation: SwiGLU, clamped or not; kernels have no other.

    Raises:
        BackendError: tensors are on the CPU, or of another dtype.
    """
    check_served(x_TH, "moe.experts", "grouped_mm")
    assert activation == SWIGLU or isinstance(
        activation, ClampedSwiGLU
    )  # the kernels have no other
    if not gather_idx_R.numel():  # an empty grid is an error; the backward still runs
        rows = x_TH, gather_idx_R, offsets_E, probs_R
        return grouped_mm_experts(*rows, weights, activation)
    return _TritonExperts.apply(activation, x_TH, gather_idx_R, offsets_E.int(), probs_R, *weights)


class _TritonExperts(torch.autograd.Function):
    """Autograd function of ``triton_experts``.

    It saves its arguments, and gate and up [R, 2I] before the activation.
    """

    @staticmethod
    def forward(ctx, activation, *args):
        # kernels assume contiguous tensors
        args = [None if arg is None else arg.contiguous() for arg in args]
        x_TH, gather_idx_R, offsets_E, probs_R = args[:4]
        gate_up_proj_E2IH, down_proj_EHI, gate_up_proj_bias_E2I, down_proj_bias_EH = args[4:]
        ctx.clamp = astuple(activation) if isinstance(activation, ClampedSwiGLU) else None
        tiles = row_tiles(offsets_E, gather_idx_R.numel())
        up = gate_up_proj_E2IH, gate_up_proj_bias_E2I
        pre_RJ, act_RI = launches.gather_up_activate(
            x_TH, gather_idx_R, *up, probs_R, tiles, ctx.clamp
        )
        out_RH = launches.rows_times_weights(
            "down", act_RI, down_proj_EHI, tiles, down_proj_bias_EH, probs_R
        )
        ctx.save_for_backward(*args, pre_RJ)
        return out_RH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_RH):
        *args, pre_RJ = ctx.saved_tensors
        x_TH, gather_idx_R, offsets_E, probs_R = args[:4]
        gate_up_proj_E2IH, down_proj_EHI, gate_up_proj_bias_E2I, down_proj_bias_EH = args[4:]
        grad_out_RH = grad_out_RH.contiguous()
        tiles = row_tiles(offsets_E, gather_idx_R.numel())
        grad_pre_RJ, act_RI, shares = launches.grad_down_activate(
            grad_out_RH, down_proj_EHI, probs_R, pre_RJ, tiles, ctx.clamp
        )
        grad_probs_R = shares.sum(1)
        grad_w_down = launches.grad_weights(
            grad_out_RH, act_RI, None, offsets_E, torch.empty_like(down_proj_EHI)
        )
        grad_w_gate_up = torch.empty_like(gate_up_proj_E2IH)
        launches.grad_weights(grad_pre_RJ, x_TH, gather_idx_R, offsets_E, grad_w_gate_up)
        grad_b_gate_up = grad_b_down = None
        if gate_up_proj_bias_E2I is not None:
            grad_b_gate_up = sum_by_expert(grad_pre_RJ, offsets_E).view_as(gate_up_proj_bias_E2I)
        if down_proj_bias_EH is not None:
            grad_b_down = sum_by_expert(
                grad_out_RH * probs_R.unsqueeze(1).to(x_TH.dtype), offsets_E
            )
            bias_RH = repeat_by_expert(down_proj_bias_EH, offsets_E, gather_idx_R.numel())
            grad_probs_R += (grad_out_RH * bias_RH).sum(-1, dtype=torch.float32)
        grad_rows_RH = launches.rows_times_weights(
            "grad_rows", grad_pre_RJ, gate_up_proj_E2IH.flatten(1, 2), tiles
        )
        grad_x_TH = launches.sum_of_tokens(grad_rows_RH, gather_idx_R, offsets_E, x_TH)
        grad_probs_R = grad_probs_R.to(probs_R.dtype)
        grad_weights = grad_w_gate_up, grad_w_down, grad_b_gate_up, grad_b_down
        return None, grad_x_TH, None, None, grad_probs_R, *grad_weights
