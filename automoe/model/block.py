"""One decoder layer: attention and feed-forward, each behind a norm, each added to the residual.

Letters: B rows, s positions of this rank between two blocks (S under tp over its ranks), H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from automoe.config.schema import ModelConfig, MoEConfig, is_linear
from automoe.model.attention import AttentionContext, build_attention
from automoe.model.delta_net import GatedDeltaNet
from automoe.model.mlp import MLP
from automoe.model.runtime import Runtime
from automoe.moe.layer import MoE
from automoe.moe.tokens import Tokens


class Block(nn.Module):
    """Pre-norm decoder layer ``layer``; dense below ``first_k_dense``, MoE from there on."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, layer: int, runtime: Runtime) -> None:
        super().__init__()
        hidden, sequence = config.hidden_size, runtime.comms.sequence
        self.input_layernorm = runtime.norm(hidden, config.norm_eps, config.zero_centered_norms)
        if is_linear(config.attention, layer):
            self.linear_attn = GatedDeltaNet(config, runtime)
        else:
            self.self_attn = build_attention(config, layer, runtime)
        self.post_attention_layernorm = runtime.norm(hidden, config.norm_eps, config.zero_centered_norms)
        self.mlp: nn.Module
        if layer < config.first_k_dense:
            self.mlp = MLP(hidden, config.intermediate_size, sequence=sequence)
        else:
            width = config.num_shared_experts * config.moe_intermediate_size
            shared = MLP(hidden, width, config.shared_expert_gate, sequence) if width else None
            moe_index = layer - config.first_k_dense
            given = runtime.comms, runtime.dispatcher, runtime.experts, runtime.seed
            self.mlp = MoE(config, moe, moe_index, shared, *given)

    @property
    def attention(self) -> nn.Module:
        """What mixes positions, by whichever name it has."""
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn

    def forward(self, x_BsH: torch.Tensor, context: AttentionContext, tokens: Tokens) -> torch.Tensor:
        """[B, s, H] -> [B, s, H]; ``tokens`` are those of x, ``context`` belongs to all positions."""
        x_BsH, h_BsH = self.mix(x_BsH, context)
        return x_BsH + (self.mlp(h_BsH, tokens) if isinstance(self.mlp, MoE) else self.mlp(h_BsH))

    def mix(self, x_BsH: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """x with attention's output added, and its norm, which the feed-forward takes."""
        x_BsH = x_BsH + self.attention(self.input_layernorm(x_BsH), context)
        return x_BsH, self.post_attention_layernorm(x_BsH)
