"""torchtitan's MoE layer: its experts and ours on the CPU (no whole step there, see ``WHY``), and all of it
in the place of ours for a step on a GPU."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import nn

from automoe.config.schema import ModelConfig
from automoe.moe.grouped_mm import grouped_mm_experts
from automoe.moe.layer import MoE

WHY = (
    "torchtitan 0.3.0 multiplies experts in bfloat16 whatever the model's dtype (GroupedExperts.forward casts "
    "rows and weights), so it has no float32 step that could pass the gate; its experts alone are timed with "
    "ours in float32 and in bfloat16, and their difference from ours in float32 is given"
)


def measure_torchtitan_experts(config: ModelConfig, num_tokens: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of gather, expert products and their backward; contenders take turns."""
    from torchtitan.models.common.moe import GroupedExperts

    num_experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    torch.manual_seed(0)
    w_gate_up = (torch.randn(num_experts, 2, width, hidden) * hidden**-0.5).requires_grad_()
    w_down = (torch.randn(num_experts, hidden, width) * width**-0.5).requires_grad_()
    theirs = GroupedExperts(GroupedExperts.Config(dim=hidden, hidden_dim=width, num_experts=num_experts))
    with torch.no_grad():
        theirs.w1_EFD.copy_(w_gate_up[:, 0])
        theirs.w3_EFD.copy_(w_gate_up[:, 1])
        theirs.w2_EDF.copy_(w_down)
    ids = torch.rand(num_tokens, num_experts).topk(config.num_experts_per_token, dim=1).indices.flatten()
    token_idx = ids.argsort(stable=True) // config.num_experts_per_token
    counts = torch.bincount(ids, minlength=num_experts)
    offsets = counts.cumsum(0).to(torch.int32)
    x = torch.randn(num_tokens, hidden, requires_grad=True)
    probs = torch.ones(token_idx.numel())
    grad = torch.randn(token_idx.numel(), hidden)

    def in_float32() -> torch.Tensor:
        return grouped_mm_experts(x, token_idx, offsets, probs, w_gate_up, w_down)

    def in_bfloat16() -> torch.Tensor:
        return grouped_mm_experts(x.bfloat16(), token_idx, offsets, probs, w_gate_up.bfloat16(), w_down.bfloat16()).to(
            x.dtype
        )

    contenders = {
        "automoe float32": in_float32,
        "automoe bfloat16": in_bfloat16,
        "torchtitan bfloat16": lambda: theirs(x[token_idx], counts),
    }
    exact = in_float32().detach()
    difference = {name: float((run().detach() - exact).norm() / exact.norm()) for name, run in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.process_time()
            run().backward(grad)
            seconds[name].append(time.process_time() - start)
            x.grad = w_gate_up.grad = w_down.grad = None
            theirs.zero_grad(set_to_none=True)
    return {
        name: {"seconds": median(seconds[name]), "seconds_rounds": seconds[name], "difference": difference[name]}
        for name in contenders
    }


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
    w_gate_up = layer.experts.w_gate_up.detach()
    experts.w1_EFD = nn.Parameter(w_gate_up[:, 0].clone())
    experts.w3_EFD = nn.Parameter(w_gate_up[:, 1].clone())
    experts.w2_EDF = nn.Parameter(layer.experts.w_down.detach())
    theirs.router.gate.weight = nn.Parameter(layer.router.weight.detach())
    theirs.tokens_per_expert_E = torch.zeros(num_experts, device=w_gate_up.device)
    return TorchtitanLayer(theirs, layer.shared_experts)


class TorchtitanLayer(nn.Module):
    """x [B, S, H] -> [B, S, H]: torchtitan's routed experts, and the shared one."""

    def __init__(self, layer: nn.Module, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.shared_experts = layer, shared_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)
