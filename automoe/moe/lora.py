"""Low-rank adapters (LoRA, arXiv 2106.09685) of routed experts, as grouped products.

``x W.T`` of each expert becomes ``x W.T + scale (x A.T) B.T``. Gate and up share one A, so that the
pair has rank r both in a layout that keeps gate and up in one tensor and in one that keeps them
apart. ``Adapter``, the base of all adapters, is here because ``automoe.model.lora`` imports this file
and cannot be imported by it. Shapes: T rows to read from, R computed rows sorted by expert, E experts
of this rank, H hidden, I expert width, J = 2 I (gate, then up), r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from automoe.comm.local_shard import global_offset, local_shard, take_over
from automoe.config.schema import LoraConfig
from automoe.kernels.activation import Activation
from automoe.kernels.counter_random import uniform_at
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.experts import GroupedExperts
from automoe.moe.grouped_mm import UNSCALED, GroupedProducts, LoopProducts, grouped_mm_experts

# A [..., r, I] and B [..., O, r] of an adapter for this rank's shard of a weight, and their scale
Added = tuple[Tensor, Tensor, float]
# values of ``moe.experts``
PRODUCTS = {"grouped_mm": UNSCALED, "loop": LoopProducts()}


class Adapter(nn.Module):
    """Base of LoRA adapters: a module with the parameters A... and B... of one adapter.

    The adapter's output is multiplied by ``scale``, alpha / rank. Dropout (arXiv 2404.09610) zeroes
    columns of A, that is input features, for a whole ``step``. A counter-based generator chooses
    the features, so the choice is equal on every mesh. An adapter does not know which token a
    routed row belongs to, so dropout does not differ between tokens.

    Args:
        name: full name in the model of the module that the adapter belongs to.
        lora: the ``lora`` section of the configuration: rank, alpha, dropout.
        seed: seed of initialisation and of dropout.
    """

    def __init__(self, name: str, lora: LoraConfig, seed: int) -> None:
        super().__init__()
        self.name = f"{name}.lora"
        self.seed = seed
        self.step = 0
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout

    @property
    def first_values(self) -> dict[str, str]:
        """Map each parameter's name to ``kept``: ``initialize`` leaves it alone; ``fill_adapters`` sets its values."""
        return {name: "kept" for name, _ in self.named_parameters(recurse=False)}

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return this rank's shard of parameter ``name`` in ``dtype``.

        In training mode the columns of A that dropout drops in ``self.step`` are zero, and the
        others are divided by 1 - dropout.
        """
        parameter = getattr(self, name)
        local = local_shard(parameter).to(dtype)
        if not (name.startswith("A") and self.dropout and self.training):
            return local
        first = global_offset(parameter)
        index = torch.arange(local.shape[-1], device=local.device) + first[-1]
        if local.dim() == 3:
            experts = torch.arange(local.shape[0], device=local.device) + first[0]
            index = (experts.unsqueeze(1) * parameter.shape[-1] + index).unsqueeze(1)
        chance = uniform_at(index, f"dropout.{self.name}.{name}.{self.step}", self.seed)
        return local * ((chance >= self.dropout) / (1 - self.dropout)).to(dtype)


class ExpertLora(Adapter):
    """LoRA adapters of a layer's routed experts.

    Gate and up have A13 [E, r, H] and B13 [E, 2, I, r], down has A2 [E, r, I] and B2 [E, H, r].
    Either pair may be missing.

    Args:
        name: full name in the model of the module with the experts.
        lora: the ``lora`` section of the configuration: rank, alpha, dropout.
        seed: seed of initialisation and of dropout.
        shapes: shapes of the parameters that exist, by name.
        product: grouped matrix product, used for the frozen matrices and for A and B alike.
    """

    NAMES = ("A13", "B13", "A2", "B2")

    def __init__(
        self,
        name: str,
        lora: LoraConfig,
        seed: int,
        shapes: dict[str, tuple[int, ...]],
        product: GroupedProducts,
    ) -> None:
        super().__init__(name, lora, seed)
        self.product = product
        for each in self.NAMES:
            self.register_parameter(
                each, nn.Parameter(torch.empty(shapes[each])) if each in shapes else None
            )

    def forward(
        self, x_TH, gather_idx_R, offsets_E, probs_R, weights: ExpertWeights, activation: Activation
    ) -> Tensor:
        """Return the experts' weighted outputs [R, H], adapters included; weights get no gradient.

        Args:
            x_TH: rows to read from, such as a rank's tokens.
            gather_idx_R: row of x that each of the R computed rows, sorted by expert, reads.
            offsets_E: int32, end of each expert's rows among the R.
            probs_R: routing weight of each computed row.
            weights: frozen matrices, which may be quantized, and biases of this rank's experts.
            activation: function of gate and up.
        """
        a13, b13, a2, b2 = (
            None if getattr(self, name) is None else self.weight(name, x_TH.dtype)
            for name in self.NAMES
        )
        adapters = a13, None if b13 is None else b13.flatten(1, 2), a2, b2
        products = self.product, self.product
        rows = x_TH, gather_idx_R, offsets_E, probs_R
        return grouped_mm_experts(
            *rows, weights, activation, *products, adapters=adapters, lora_scale=self.scale
        )


class LoRAExperts(GroupedExperts):
    """Experts with LoRA adapters, in place of ``base``.

    Args:
        base: experts whose parameters, which may be quantized, this module takes over, frozen.
        lora: module with the adapters; its forward computes the experts, frozen products included.
    """

    def __init__(self, base: GroupedExperts, lora: ExpertLora) -> None:
        take_over(self, base)
        self.lora = lora
        self.backend = lora.__call__  # no module, whose parameters would get a second name
