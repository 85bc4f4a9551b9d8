"""Computation of a ``transformers`` model's experts by automoe's expert backends."""

from __future__ import annotations

from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automoe.classes.build import ADAPTED_STACKS
from automoe.kernels.activation import SWIGLU
from automoe.moe.dispatch.base import run_choices
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.experts import ExpertBackend


def are_swiglu(experts: nn.Module) -> bool:
    """Return whether ``experts`` computes plain SwiGLU with weights [E, 2I, H] and [E, H, I].

    Its activation is compared with SwiGLU on sample numbers; large ones among them reveal a clamp.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
    plain = getattr(experts, "has_gate", False) and not (
        experts.is_transposed
        or experts.has_bias
        or getattr(experts, "has_post_expert_norm", False)  # since transformers 5.20
    )
    if not plain or shapes.keys() != ADAPTED_STACKS or list(experts.buffers()):
        return False
    num_experts, hidden, width = shapes["down_proj"]
    if shapes["gate_up_proj"] != (num_experts, 2 * width, hidden):
        return False
    joined = torch.linspace(-30, 30, 4 * 2 * width, device="cpu").view(-1, 2 * width)
    joined = joined[:, torch.arange(2 * width, device="cpu") * 7 % (2 * width)]
    gate, up = joined.chunk(2, dim=-1)
    return torch.allclose(experts._apply_gate(joined), F.silu(gate) * up)


def compute_by(experts: nn.Module, backend: ExpertBackend) -> None:
    """Make the forward of ``experts`` (a transformers module with plain SwiGLU) call ``backend``."""

    @wraps(experts.forward)  # ``experts_modules`` reads the signature
    def forward(x_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_up_E2IH = experts.gate_up_proj.unflatten(1, (2, -1))
        weights = ExpertWeights(gate_up_E2IH, experts.down_proj)

        def multiply(x, gather_idx, offsets, probs) -> Tensor:
            return backend(x, gather_idx, offsets, probs, weights, SWIGLU)

        chosen = top_k_index, top_k_weights
        out_TH = run_choices(x_TH, *chosen, multiply, experts.num_experts, top_k_index.numel())
        return out_TH.to(x_TH.dtype)

    experts.forward = forward  # type: ignore[method-assign]
