"""The MoE layer: tokens -> router -> dispatch -> experts -> combine, shared experts beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from automoe.config.schema import ModelConfig, MoEConfig
from automoe.moe.activation import expert_activation
from automoe.moe.beside import run_beside
from automoe.moe.capacity import dispatch_padded, rows_per_expert
from automoe.moe.communicators import Communicators
from automoe.moe.dispatch import Dispatcher, LocalDispatcher
from automoe.moe.experts import GroupedExperts, expert_backend
from automoe.moe.router import Router
from automoe.moe.tokens import Tokens


def local_dispatcher(num_experts: int, moe: MoEConfig) -> LocalDispatcher:
    """The dispatcher of a rank that holds all experts."""
    return LocalDispatcher(num_experts, drops=moe.capacity_factor > 0 and not moe.pad_to_capacity)


class MoE(nn.Module):
    """Sparse feed-forward; the layer itself knows no ranks.

    Args:
        shared_experts: dense FFN that every token passes, or None.
        moe_index: number of this layer among the model's MoE layers, for replayed routing.
        comms: groups of ranks that share rows and micro-batches; default: one rank.
        dispatcher: brings tokens to experts; default: all experts are on this rank.
        seed: of the router's jitter.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        moe_index: int,
        shared_experts: nn.Module | None,
        comms: Communicators | None = None,
        dispatcher: Dispatcher | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.comms = comms or Communicators()
        self.router = Router(config, moe, moe_index, self.comms, seed)
        self.experts = GroupedExperts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            expert_backend(moe.experts),
            config.biased_experts,
            expert_activation(config),
        )
        self.shared_experts = shared_experts
        self.moe, self.num_experts = moe, config.num_experts
        self.dispatcher = dispatcher or local_dispatcher(config.num_experts, moe)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        routing = self.router(x, tokens)
        # Started first: the host waits for sizes in the dispatch, with this work already queued.
        shared = self._start_shared_experts(x)
        y = self.run_experts(x, routing.ids, routing.weights, routing.kept, tokens)
        return y if shared is None else y + shared()

    def _start_shared_experts(self, x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """What gives their output [B, S, H] when it is due; None where there are none."""
        if self.shared_experts is None:
            return None
        if self.moe.overlap_shared_experts and x.is_cuda:
            return run_beside(self.shared_experts, x)
        return partial(self.shared_experts, x)

    def run_experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        kept: torch.Tensor | None,
        tokens: Tokens,
    ) -> torch.Tensor:
        """x [B, S, H] routed by ids, weights and kept [B, S, K] -> [B, S, H]: dispatch, experts, combine."""
        shape = x.shape
        x, ids, weights = x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)
        if kept is None:
            return self.dispatcher(x, ids, weights, self.experts).view(shape)
        return self._dispatch_kept(x, ids, weights, kept.flatten(0, 1), tokens).view(shape)

    def _dispatch_kept(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, tokens: Tokens
    ) -> torch.Tensor:
        if self.moe.pad_to_capacity:
            capacity = rows_per_expert(self.moe, tokens, self.comms, ids.shape[1], self.num_experts)
            return dispatch_padded(self.dispatcher, x, ids, weights, kept, self.experts, self.num_experts, capacity)
        return self.dispatcher(x, ids.masked_fill(~kept, self.num_experts), weights, self.experts)
