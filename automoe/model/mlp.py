"""SwiGLU feed-forward (arXiv 2002.05202, eq. 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from automoe.model.linear import Linear
from automoe.moe.communicators import SINGLE_RANK, Communicator


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); x [B, S, H] -> [B, S, H].

    With ``gated_output`` (Qwen2-MoE's shared expert) the result is multiplied by sigmoid(x @ w), one number
    a token.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        gated_output: bool = False,
        sequence: Communicator = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.output_gate = Linear(hidden_size, 1) if gated_output else None
        self.sequence = sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.sequence.all_gather(x)
        out = self.sequence.reduce_scatter(self.down_proj(F.silu(self.gate_proj(whole)) * self.up_proj(whole)))
        # Where tokens are cut, the gate sees this rank's part of them, as the result here holds no others.
        return out if self.output_gate is None else self.output_gate(x).sigmoid() * out
