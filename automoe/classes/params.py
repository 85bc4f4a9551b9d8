"""The table of parameters of a class of ``transformers``, and which of them may get adapters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from automoe.classes.build import (
    ADAPTED_STACKS,
    build_causal_lm,
    decoder_layers,
    experts_modules,
    holds_experts,
    is_tied,
)
from automoe.config.hub import local_folder
from automoe.model.param_spec import Param, ParamSpec

# The first of these words in a parameter's name tells its part of the model.
_PART_WORDS = (
    ("norm", "norms"),
    ("shared", "shared_experts"),
    ("router", "router"),
    (".gate.", "router"),
    ("attn", "attention"),
    ("attention", "attention"),
    ("mixer", "attention"),
    ("mamba", "attention"),
    ("conv", "attention"),
    ("", "dense_ffn"),
)
_PLACES = {"attention": 1, "router": 7, "dense_ffn": 7, "shared_experts": 7, "routed_experts": 7}
# Groups of ``lora.targets``, by part.
_GROUPS = {
    "attention": "attention",
    "dense_ffn": "mlp",
    "shared_experts": "shared_experts",
    "routed_experts": "experts",
}


def class_params(path: str) -> tuple[Param, ...]:
    """Return the parameters of the class of ``config.json``, in order, and saved buffers.

    Raises:
        ConfigError: as ``build_causal_lm``.
    """
    return _class_params(path, (local_folder(path) / "config.json").read_bytes())


@cache
def _class_params(path: str, stated: bytes) -> tuple[Param, ...]:
    model = build_causal_lm(path)
    layer_of = {
        tensor: number
        for number, layer in enumerate(decoder_layers(model))
        for tensor in layer.state_dict(keep_vars=True).values()
    }
    experts = {p for module in experts_modules(model).values() for p in module.parameters()}
    adapted = _adapted(model)
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    part_of = {module.weight: part for part, module in reversed(ends.items()) if module is not None}
    params = []
    if is_tied(model):
        model.set_output_embeddings(None)
    for name, parameter in model.state_dict(keep_vars=True).items():
        part = "routed_experts" if parameter in experts else part_of.get(parameter)
        if part is None:
            part = next(part for word, part in _PART_WORDS if word in name)
        matrix = parameter.dim() > 1 and not name.endswith("bias")
        kind = "matrix" if matrix else "vector"
        if not isinstance(parameter, nn.Parameter):
            kind = "buffer"
        if part == "router" and not matrix:
            part = "norms"
        spec = ParamSpec(name, "", _PLACES.get(part, 0), kind, part=part)
        if name in adapted and (group := _GROUPS.get(part)):
            # As in native families, names of attention's matrices stand alone.
            inside = "" if group == "attention" else f"{group}."
            spec = replace(spec, shape="O I", group=group, lora=inside + adapted[name])
        params.append(Param(name, tuple(parameter.shape), spec, layer_of.get(parameter)))
    return tuple(params)


def _adapted(model: Any) -> dict[str, str]:
    """Return the parameters that may get adapters, each with its last name in ``lora.targets``.

    These are the matrices of linear layers, named as the layer, and stacks [E, O, I] of experts
    under transformers' usual names. Vectors (gates of one number) have no adapter.
    """
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and module.out_features > 1:
            found[f"{name}.weight"] = last
        elif holds_experts(module) and not getattr(module, "is_transposed", False):
            stacks = {one: p for one, p in module.named_parameters() if p.dim() == 3}
            if stacks.keys() == ADAPTED_STACKS:
                found |= {f"{name}.{one}": one for one in stacks}
    return found


class _WithoutNumbers(TorchFunctionMode):
    """Mode that lets code that reads tensor values run on meta.

    Every value that is read is one, and ``nonzero`` finds no element.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__index__):
            return func(torch.ones((), dtype=args[0].dtype, device="cpu"))
        if func in (torch.nonzero, Tensor.nonzero):
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


@cache
def uncalled_layers(path: str) -> frozenset[str]:
    """Return the weights of linear layers that the class reads without calling the layer.

    The class runs on meta. The result is empty if its code fails there; the first forward pass of a
    run then finds such a layer (``automoe.classes.lora.check_called``).
    """
    model = build_causal_lm(path)
    left = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, key=f"{name}.weight": left.discard(key))
    with torch.device("meta"), torch.no_grad(), _WithoutNumbers():
        try:
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
        except Exception:  # code of a class may raise any exception on meta
            return frozenset()
    return frozenset(left)
