"""Pairs of layers in LongCat-Flash's ``config.json``, and a class that loads its files."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from automoe.config.schema import ModelConfig
from automoe.hf.families.as_transformers import damaged
from automoe.hf.families.family import Family
from automoe.hf.wrapper import HFConfig


class Pairs(Family):
    """Family whose ``config.json`` counts pairs of layers, as ``num_layers``."""

    def read_config(self, hf: HFConfig, path: str) -> ModelConfig:
        """See ``Family``. ``num_hidden_layers`` may count either; transformers halves it."""
        pairs, layers = hf.get("num_layers"), hf.get("num_hidden_layers")
        if isinstance(pairs, int):
            if layers not in (None, pairs, 2 * pairs):
                raise damaged(path, f"num_hidden_layers={layers} and num_layers={pairs} pairs")
            hf = hf | {"num_hidden_layers": 2 * pairs}
        elif isinstance(layers, int) and layers % 2:
            raise damaged(path, f"num_hidden_layers={layers}, which is no number of pairs")
        return super().read_config(hf, path)

    @staticmethod
    @cache
    def mend() -> None:
        """Give identity experts of transformers' class no gates, in this process.

        transformers 5.23 makes gates that nothing reads, and so cannot load published files,
        which lack them.
        """
        from torch.nn import Parameter
        from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

        make = LongcatFlashExperts.__init__

        @wraps(make)
        def make_without(self: Any, config: Any) -> None:
            make(self, config)
            if len(self.gate_up_proj) > self.num_routed_experts:
                self.gate_up_proj = Parameter(self.gate_up_proj[: self.num_routed_experts].detach())

        LongcatFlashExperts.__init__ = make_without
