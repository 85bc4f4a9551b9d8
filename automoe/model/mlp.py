"""SwiGLU feed-forward (arXiv 2002.05202, eq. 5).

Letters: B rows, S positions, H hidden; s positions of this rank between two blocks (sequence parallelism).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from automoe.model.linear import Linear
from automoe.moe.communicators import SINGLE_RANK, Communicator


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [B, s, H] -> [B, s, H].

    With ``gated_output`` (Qwen2-MoE's shared expert) the result is multiplied by sigmoid(x @ w), one number
    a token.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, gated_output: bool = False, sequence: Communicator = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.output_gate = Linear(hidden_size, 1) if gated_output else None
        self.sequence = sequence

    def forward(self, x_BsH: torch.Tensor) -> torch.Tensor:
        x_BSH = self.sequence.all_gather(x_BsH)
        out_BsH = self.sequence.reduce_scatter(self.down_proj(F.silu(self.gate_proj(x_BSH)) * self.up_proj(x_BSH)))
        # The gate sees this rank's positions alone, as the result here holds no others.
        return out_BsH if self.output_gate is None else self.output_gate(x_BsH).sigmoid() * out_BsH
