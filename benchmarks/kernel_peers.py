"""Who computes a MoE layer in ``moe_kernel.py``, each from the same weights, choices and routing weights.

``torchtitan_moe`` is torchtitan's whole layer, for the steps of ``train_step.py``.

Shapes: T tokens, K top-k, E experts, H hidden, I expert width. A peer is built for one routing and is then a
function (x [T, H], weights [T, K], gate_up_proj [E, 2, I, H], down_proj [E, H, I]) -> [T, H].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from automoe.config.schema import ModelConfig
from automoe.errors import BackendError
from automoe.moe.dispatch.base import LocalDispatcher, sort_by_expert
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.experts import expert_backend
from automoe.moe.layer import MoE

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Absent(Exception):
    """A peer that cannot run here, and why."""


@dataclass(frozen=True)
class Shape:
    """One model's layer, or the slice of it that one rank of an expert-parallel group has."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """Of the forward pass; the backward pass has twice as many."""
        return 6 * self.tokens * self.top_k * self.hidden * self.width

    @property
    def ideal_saved_bytes(self) -> int:
        """A token's, in two-byte numbers: the row itself, and gate and up of its K choices."""
        return 2 * self.hidden + 4 * self.top_k * self.width


def ours(backend: str) -> Callable[[Shape, torch.Tensor], Layer]:
    """This project's local dispatcher with one of its expert backends."""

    def build(shape: Shape, ids: torch.Tensor) -> Layer:
        if backend != "grouped_mm" and ids.device.type != "cuda":
            raise Absent(f"moe.experts={backend} needs CUDA")
        try:
            dispatch, experts = LocalDispatcher(shape.experts), expert_backend(backend)
        except BackendError as error:
            raise Absent(str(error)) from None

        def layer(x, weights, gate_up_proj, down_proj):
            def run(rows, gather_idx, offsets, probs):
                return experts(rows, gather_idx, offsets, probs, ExpertWeights(gate_up_proj, down_proj))

            return dispatch(x, ids, weights, run)

        return layer

    return build


def eager_loop(shape: Shape, ids: torch.Tensor) -> Layer:
    """One expert after the other, rows gathered and added back: what transformers calls eager."""

    def layer(x, weights, gate_up_proj, down_proj):
        out = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(gate_up_proj.unbind(0), down_proj.unbind(0), strict=True)):
            token, choice = torch.where(ids == expert)
            gate, up = F.linear(x[token], gate_up.flatten(0, 1)).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, down) * weights[token, choice, None].to(x.dtype)
            out.index_add_(0, token, rows)
        return out

    return layer


def three_products(shape: Shape, ids: torch.Tensor) -> Layer:
    """Permuted rows through three grouped products, weighted last: the arrangement of torchtitan's experts."""

    def layer(x, weights, gate_up_proj, down_proj):
        order, counts = sort_by_expert(ids, shape.experts)
        ends, token = counts.cumsum(0).to(torch.int32), order // shape.top_k
        rows = x[token]
        gate = F.grouped_mm(rows, gate_up_proj[:, 0].transpose(1, 2), offs=ends)
        up = F.grouped_mm(rows, gate_up_proj[:, 1].transpose(1, 2), offs=ends)
        rows = F.grouped_mm(F.silu(gate) * up, down_proj.transpose(1, 2), offs=ends)
        rows = rows * weights.flatten()[order].unsqueeze(1).to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, rows)

    return layer


def transformers_grouped_mm(shape: Shape, ids: torch.Tensor) -> Layer:
    """The function behind ``experts_implementation="grouped_mm"``."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    def layer(x, weights, gate_up_proj, down_proj):
        module: Any = SimpleNamespace(
            num_experts=shape.experts,
            gate_up_proj=gate_up_proj.flatten(1, 2),
            down_proj=down_proj,
            has_gate=True,
            has_bias=False,
            has_post_expert_norm=False,
            is_transposed=False,
            is_concatenated=True,
            _is_expert_parallel=False,
            _apply_gate=lambda both: F.silu(both.chunk(2, dim=-1)[0]) * both.chunk(2, dim=-1)[1],
        )
        return grouped_mm_experts_forward(module, x, ids, weights.to(x.dtype))

    return layer


def liger(shape: Shape, ids: torch.Tensor) -> Layer:
    """liger-kernel's fused MoE (needs no build; Triton)."""
    if ids.device.type != "cuda":
        raise Absent("liger-kernel's kernels need CUDA")
    function = _package("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    choices = ids.int()

    def layer(x, weights, gate_up_proj, down_proj):
        return function.apply(x, gate_up_proj.flatten(1, 2), down_proj, choices, weights)

    return layer


def sonic(shape: Shape, ids: torch.Tensor) -> Layer:
    """SonicMoE (CuTe DSL, Hopper and later)."""
    if ids.device.type != "cuda":
        raise Absent("SonicMoE's kernels need CUDA")
    package = _package("sonicmoe")
    token = torch.arange(shape.tokens, device=ids.device).repeat_interleave(shape.top_k).int()
    choices = ids.flatten().int()

    def layer(x, weights, gate_up_proj, down_proj):
        out, *_ = package.moe_general_routing_inputs(
            x,
            weights.flatten().to(x.dtype),
            token,
            choices,
            gate_up_proj.flatten(1, 2).permute(1, 2, 0),
            None,
            down_proj.permute(1, 2, 0),
            None,
            E=shape.experts,
            activation_type=package.enums.ActivationType.SWIGLU,
            is_inference_mode_enabled=False,
            stream_id=None,
        )
        return out

    return layer


def bmm_bound(shape: Shape, ids: torch.Tensor) -> Layer:
    """No layer but its products, as many rows for every expert, nothing routed: no peer can be faster for long."""
    if shape.tokens * shape.top_k % shape.experts:
        raise Absent("T K is no multiple of E")
    rows = torch.randn(
        shape.experts,
        shape.tokens * shape.top_k // shape.experts,
        shape.hidden,
        device=ids.device,
        dtype=torch.bfloat16,
        requires_grad=True,
    )

    def layer(x, weights, gate_up_proj, down_proj):
        gate, up = (rows.to(x.dtype) @ gate_up_proj.flatten(1, 2).transpose(1, 2)).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ down_proj.transpose(1, 2)

    return layer


PEERS: dict[str, Callable[[Shape, torch.Tensor], Layer]] = {
    "automoe triton": ours("triton"),
    "automoe grouped_mm": ours("grouped_mm"),
    "automoe te": ours("te"),
    "transformers grouped_mm": transformers_grouped_mm,
    "three grouped_mm": three_products,
    "liger": liger,
    "sonicmoe": sonic,
    "eager loop": eager_loop,
    "bmm bound": bmm_bound,
}
MUST_RUN = ("automoe triton", "automoe grouped_mm")  # where they can; others may fail and are then absent
NOT_A_LAYER = "bmm bound"  # computes something else: timed, not compared


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:  # such packages raise all kinds where a GPU or a library is not to their liking
        raise Absent(f"import {name}: {type(error).__name__}: {error}") from None


def torchtitan_moe(config: ModelConfig, layer: MoE) -> nn.Module:
    """torchtitan's MoE layer with the weights of ``layer``; a shared expert, which is a plain FFN, stays ours.

    Expert biases are neither taken over nor moved. Its experts apply routing weights to their outputs.
    """
    from torchtitan.models.common import moe as titan
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    num_experts, top_k, hidden = config.num_experts, config.num_experts_per_token, config.hidden_size
    grouped, router = config.router.num_groups > 1, config.router
    with torch.device("meta"):
        theirs = titan.MoE(
            titan.MoE.Config(
                num_experts=num_experts,
                routed_experts=titan.RoutedExperts.Config(
                    inner_experts=titan.GroupedExperts.Config(
                        dim=hidden, hidden_dim=config.moe_intermediate_size, num_experts=num_experts
                    ),
                    token_dispatcher=LocalTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
                ),
                router=titan.TokenChoiceTopKRouter.Config(
                    num_experts=num_experts,
                    gate=Linear.Config(in_features=hidden, out_features=num_experts),
                    num_expert_groups=router.num_groups if grouped else None,
                    num_limited_groups=router.topk_groups if grouped else None,
                    top_k=top_k,
                    score_func=router.score,
                    route_norm=router.norm_topk_prob,
                    route_scale=router.routed_scaling_factor,
                ),
                load_balance_coeff=None,
            )
        )
    experts = theirs.routed_experts.inner_experts
    gate_up_proj = layer.experts.gate_up_proj.detach()
    experts.w1_EFD = nn.Parameter(gate_up_proj[:, 0].clone())
    experts.w3_EFD = nn.Parameter(gate_up_proj[:, 1].clone())
    experts.w2_EDF = nn.Parameter(layer.experts.down_proj.detach())
    theirs.router.gate.weight = nn.Parameter(layer.router.weight.detach())
    theirs.tokens_per_expert_E = torch.zeros(num_experts, device=gate_up_proj.device)
    return TorchtitanLayer(theirs, layer.shared_experts)


class TorchtitanLayer(nn.Module):
    """x [B, S, H] -> [B, S, H]: torchtitan's routed experts, and the shared one."""

    def __init__(self, layer: nn.Module, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.shared_experts = layer, shared_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)
