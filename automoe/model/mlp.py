"""SwiGLU feed-forward (arXiv 2002.05202, eq. 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from automoe.model.linear import Linear
from automoe.rows import TokenSplit, WholeTokens


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); x [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.split: TokenSplit = WholeTokens()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.split.gather(x)
        return self.split.reduce(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
