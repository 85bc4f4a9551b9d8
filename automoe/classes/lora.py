"""LoRA adapters for models that run the code of ``transformers``.

A linear layer adds its adapter's output to its own. Experts are multiplied by code that needs whole
weights, so they compute with weight + B A, as in ``peft``. This sum is a copy of one layer's
experts on this rank, made in each pass.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor, nn
from torch.func import functional_call

from automoe.classes.expert_parallel import OwnCode
from automoe.comm.local_shard import local_shard
from automoe.errors import ConfigError
from automoe.moe.lora import Adapter, ExpertLora


def add_to_linear(linear: nn.Module, adapter: nn.Module) -> None:
    """Add a LoRA adapter to ``linear`` as submodule ``lora``; its output is added to the layer's."""
    linear.add_module("lora", adapter)

    def add(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        adapter.called = True
        return out + adapter(args[0], None)

    linear.register_forward_hook(add)


def add_to_experts(experts: nn.Module, adapters: ExpertLora) -> None:
    """Add LoRA adapters to ``experts`` as submodule ``lora``: forward uses weight + scale B A."""
    experts.add_module("lora", adapters)
    code = OwnCode(experts)

    @wraps(code.own_forward)  # ``experts_modules`` reads the signature
    def forward(*args, **kwargs) -> Tensor:
        weights = {}
        for name, number in (("gate_up_proj", "13"), ("down_proj", "2")):
            if getattr(adapters, f"A{number}") is not None:
                weight = local_shard(getattr(experts, name))
                a_ErI, b_EOr = (adapters.weight(each + number, weight.dtype) for each in "AB")
                weights[f"module.{name}"] = torch.baddbmm(
                    weight, b_EOr, a_ErI, alpha=adapters.scale
                )
        return functional_call(code, weights, args, kwargs)

    experts.forward = forward  # type: ignore[method-assign]


def check_called(model: nn.Module) -> None:
    """Check that the last forward pass called all linear layers with LoRA adapters.

    Raises:
        ConfigError: the model's code reads the weight of such a layer without calling the layer, so
            its adapter has no effect.
    """
    adapters = (module for module in model.modules() if isinstance(module, Adapter))
    others = [module for module in adapters if not isinstance(module, ExpertLora)]
    names = [m.name.removesuffix(".lora") for m in others if not getattr(m, "called", False)]
    if names:
        rule = "the class reads the weight of this layer and does not call it, so an adapter adds nothing"
        raise ConfigError("lora.targets", names[0], rule, "Name other matrices")
