"""Low-rank adapters of a decoder's matrices, and the freezing of its other parameters.

Letters: B rows, S positions, I input and O output features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automoe.comm.local_shard import local_shard, take_over
from automoe.config.schema import Config, LoraConfig
from automoe.kernels.counter_random import uniform_at
from automoe.model.causal_lm import CausalLM
from automoe.model.init import indexed_blocks
from automoe.model.linear import Features, Linear, take_features
from automoe.model.params import Param, is_wide, layer_params, model_params
from automoe.model.trainable import adapters, is_target, is_trained, packed_shape
from automoe.moe.experts import GroupedExperts
from automoe.moe.lora import PRODUCTS, Adapter, ExpertLora, LoRAExperts


class Lora(Adapter):
    """The LoRA adapter of a ``Linear``: A [r, I], B [O, r].

    Under tensor parallelism B is sharded with the output features, or A with the input features.
    The other matrix is replicated, and each rank's gradient of it is a term of a sum over ranks, as
    for any replicated parameter.

    Args:
        name: full name in the model of the ``Linear``.
        lora: the ``lora`` section of the configuration: rank, alpha, dropout.
        seed: seed of initialisation and of dropout.
        in_features, out_features: I and O.
    """

    def __init__(
        self, name: str, lora: LoraConfig, seed: int, in_features: int, out_features: int
    ) -> None:
        super().__init__(name, lora, seed)
        self.A = nn.Parameter(torch.empty(lora.rank, in_features))
        self.B = nn.Parameter(torch.empty(out_features, lora.rank))

    def forward(self, x_BSI: Tensor, features: Features) -> Tensor:
        """Return the adapter's output for x: [B, S, O], or with ``features`` only these ranges of O, concatenated."""
        b_Or = self.weight("B", x_BSI.dtype)
        low_BSr = F.linear(x_BSI, self.weight("A", x_BSI.dtype)) * self.scale
        return F.linear(low_BSr, take_features(b_Or, features))


class LoRALinear(Linear):
    """Linear layer that takes the place of ``base`` and adds the output of its LoRA adapter.

    Args:
        base: layer whose parameters this layer takes over.
        lora: the adapter.
    """

    def __init__(self, base: Linear, lora: Lora) -> None:
        take_over(self, base)
        self.lora = lora

    def multiply(self, x_BSI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return super().multiply(x_BSI, bias_O) + self.lora(x_BSI, self.features)


def freeze_and_adapt(
    part: CausalLM, config: Config, trained_dtype: torch.dtype, frozen_dtype: torch.dtype
) -> None:
    """Freeze the parameters that ``lora`` or ``train.freeze`` exclude, and add adapters on meta.

    Modules with adapters are replaced by ``LoRALinear`` and ``LoRAExperts``.

    Args:
        part: decoder, or a pipeline stage of it, on the meta device.
        trained_dtype: dtype of adapters.
        frozen_dtype: dtype in which frozen parameters are stored and multiplied, except those of
            routers and hyper-connections; they need no wider copy, since they are not updated.
            Matrices that ``lora.base`` quantizes are bytes.
    """
    if not (config.lora.rank or config.train.freeze):
        return
    shapes = {param.name: packed_shape(param, config) for param in model_params(config.model)}
    for name, parameter in list(part.named_parameters()):
        if is_trained(name, config):
            continue
        # Routers and hyper-connections keep their dtype, in which they compute.
        stored = parameter if is_wide(name) else parameter.to(frozen_dtype)
        if (shape := shapes.get(name)) is not None:
            stored = torch.empty(shape, dtype=torch.uint8, device=parameter.device)
        path, _, last = name.rpartition(".")
        frozen = nn.Parameter(stored, requires_grad=False)
        part.get_submodule(path).register_parameter(last, frozen)
    for unit in part.units() if config.lora.rank else ():
        _add_adapters(part, layer_params(config.model, unit.number), config, trained_dtype)


def _add_adapters(part: CausalLM, params: list[Param], config: Config, dtype: torch.dtype) -> None:
    """Replace a layer's modules that get adapters, and its quantized experts, by LoRA's classes.

    These are ``LoRALinear`` and ``LoRAExperts``. Modules of classes that are not automoe's are not
    replaced; ``part`` adds the adapters' outputs to their outputs (``CausalLM.add_adapter``).

    Args:
        part: model, or pipeline stage of it, that holds the layer.
        params: the layer's own parameters, without adapters.
        dtype: dtype of adapters.
    """
    lora = config.lora
    by_module: dict[str, list[Param]] = {}
    for param in params:
        packed_expert = param.expert and packed_shape(param, config) is not None
        if is_target(param, lora) or packed_expert:
            by_module.setdefault(param.name.rpartition(".")[0], []).append(param)
    for name, owned in by_module.items():
        base = part.get_submodule(name)
        options = (name, lora, config.train.seed)
        if any(param.expert for param in owned):
            made = [each for p in owned if is_target(p, lora) for each in adapters(p, lora.rank)]
            shapes = {each.name.rpartition(".")[2]: each.shape for each in made}
            adapter = ExpertLora(*options, shapes, PRODUCTS[config.moe.experts])
        else:
            adapter = Lora(*options, *reversed(owned[0].shape))
        adapter.to("meta", dtype)
        if isinstance(base, GroupedExperts):
            part.set_submodule(name, LoRAExperts(base, adapter))
        elif isinstance(base, Linear):
            part.set_submodule(name, LoRALinear(base, adapter))
        else:
            part.add_adapter(base, adapter)


def fill_adapters(part: CausalLM) -> None:
    """Initialise the adapters of a pipeline stage so that they add nothing to outputs.

    A is uniform within +-1 / sqrt(input features), the default of peft; B is zero. A number depends
    on the seed, the matrix's name and its index in the whole matrix alone, so every mesh has the
    same values.
    """
    for module in part.modules():
        if not isinstance(module, Adapter):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            local = local_shard(parameter.detach())
            if name.startswith("B"):
                local.zero_()
                continue
            stream = f"{module.name}.{name}"
            bound = 1 / sqrt(parameter.shape[-1])
            for block, index in indexed_blocks(parameter):
                drawn = uniform_at(index, stream, module.seed)
                local[block] = ((2 * drawn - 1) * bound).to(local.dtype)


def set_dropout_step(parts: Iterable[CausalLM], step: int) -> None:
    """Set the step number (from 0) of all adapters in ``parts``; dropout draws other input features each step."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, Adapter):
                module.step = step
