"""The ``grouped_mm`` expert backend with its products in 8 bits (``train.fp8``)."""

from __future__ import annotations

import torch
from torch import nn

from automoe.moe.activation import SWIGLU, Activation
from automoe.moe.grouped_mm import grouped_mm_experts
from automoe.quantise.grouped import QuantisedGroupedProducts
from automoe.quantise.scaling import Scaling


class QuantisedExperts(nn.Module):
    """An ``ExpertFn``; the gate and up projection has one scaling, the down projection another.

    Activation, routing weights and biases are applied in the dtype of x.
    """

    def __init__(self, up: Scaling, down: Scaling) -> None:
        super().__init__()
        self.up, self.down = QuantisedGroupedProducts(up), QuantisedGroupedProducts(down)

    def forward(
        self,
        x: torch.Tensor,
        gather_idx: torch.Tensor,
        offsets: torch.Tensor,
        probs: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        activation: Activation = SWIGLU,
    ) -> torch.Tensor:
        weights = (w_gate_up, w_down, b_gate_up, b_down)
        return grouped_mm_experts(
            x, gather_idx, offsets, probs, *weights, activation, up_products=self.up, down_products=self.down
        )
