"""Low-rank adapters of a decoder's matrices, and the freezing of its other parameters.

Letters: B rows, S positions, I input and O output features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.config.schema import Config, LoraConfig
from automoe.kernels.counter_random import bits_at, stream_key, uniform_from
from automoe.model.adapters import adapters, is_target, is_trained, packed_shape
from automoe.model.decoder import Decoder
from automoe.model.init import indexed_blocks
from automoe.model.linear import Linear
from automoe.model.params import layer_params, model_params
from automoe.moe.experts import GroupedExperts
from automoe.moe.local_shard import global_offset, local_shard
from automoe.moe.lora import PRODUCTS, Adapter, ExpertLora
from automoe.quantize.packed import block_size, is_packed, packed_product


class Lora(Adapter):
    """The adapter of a ``Linear``: A [r, I], B [O, r].

    Under tensor parallelism B is sharded with the output features, or A with the input features.
    Every rank keeps the other one whole, and its gradient there is a term of a sum, as for any
    parameter that tp leaves whole.
    """

    def __init__(
        self, name: str, lora: LoraConfig, seed: int, in_features: int, out_features: int
    ) -> None:
        super().__init__(name, lora, seed)
        self.A = nn.Parameter(torch.empty(lora.rank, in_features))
        self.B = nn.Parameter(torch.empty(out_features, lora.rank))

    def forward(self, x_BSI: torch.Tensor, rows: slice | None) -> torch.Tensor:
        """Return the adapter's term of the output [B, S, O], or of these ``rows`` of it."""
        b_Or = self.weight("B", x_BSI.dtype)
        low_BSr = F.linear(x_BSI, self.weight("A", x_BSI.dtype)) * self.scale
        return F.linear(low_BSr, b_Or if rows is None else b_Or[rows])


def adapt(
    part: Decoder, config: Config, trained_dtype: torch.dtype, frozen_dtype: torch.dtype
) -> None:
    """Give a part of the model its adapters (``lora``) and freeze the rest, on the meta device.

    ``train.freeze`` names frozen parameters without LoRA. Frozen parameters are stored in
    ``frozen_dtype``, in which they are multiplied, since no update is added to them. Matrices that
    ``lora.base`` names are packed (``automoe.quantize.packed``).
    """
    rank = config.lora.rank
    if not (rank or config.train.freeze):
        return
    for name, parameter in part.named_parameters():
        if not is_trained(name, config):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(frozen_dtype)
    for layer in part.layers if rank else ():
        targets = [
            param
            for param in layer_params(config.model, int(layer))
            if is_target(param, config.lora)
        ]
        stacks = {
            made.name.rpartition(".")[2]: made.shape
            for p in targets
            if p.expert
            for made in adapters(p, rank)
        }
        for name in dict.fromkeys(param.name.rpartition(".")[0] for param in targets):
            module = part.get_submodule(name)
            given = (name, config.lora, config.train.seed)
            if isinstance(module, GroupedExperts):
                adapter: Adapter = ExpertLora(*given, stacks, PRODUCTS[config.moe.experts])
            else:
                assert isinstance(module, Linear)
                adapter = Lora(*given, module.weight.shape[1], module.weight.shape[0])
            module.lora = adapter.to("meta", trained_dtype)
    if config.lora.base != "weights":
        _pack(part, config)


def _pack(part: Decoder, config: Config) -> None:
    """Pack frozen matrices into blocks of bytes, and make their modules widen them to multiply."""
    shapes = {param.name: packed_shape(param, config) for param in model_params(config.model)}
    for name, parameter in list(part.named_parameters()):
        if (shape := shapes.get(name)) is None:
            continue
        path, _, last = name.rpartition(".")
        module = part.get_submodule(path)
        packed = torch.empty(shape, dtype=torch.uint8, device=parameter.device)
        module.register_parameter(last, nn.Parameter(packed, requires_grad=False))
        if isinstance(module, Linear):
            module.product = packed_product
        elif module.lora is None:  # experts without adapters use the same product
            module.lora = ExpertLora(
                path, config.lora, config.train.seed, {}, PRODUCTS[config.moe.experts]
            )


def fill_adapters(part: Decoder) -> None:
    """Initialise adapters so that they add nothing.

    A is uniform within 1 / sqrt(input features), as in peft; B is zero. Values are equal on every
    mesh, as in ``automoe.model.init``.
    """
    for module in part.modules():
        if not isinstance(module, Adapter):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            local = local_shard(parameter.detach())
            if name.startswith("B"):
                local.zero_()
                continue
            key = stream_key(f"{module.name}.{name}", module.seed)
            bound = 1 / sqrt(parameter.shape[-1])
            for block, index in indexed_blocks(parameter):
                local[block] = ((2 * uniform_from(bits_at(index, key)) - 1) * bound).to(local.dtype)


@torch.no_grad()
def merge_adapters(part: Decoder) -> None:
    """Add the adapters' products to the weights, and set every B to zero. Collective.

    The sum is computed in at least float32 and rounded once to the weight's dtype; each rank merges
    its shard of a weight. Packed weights and their B stay unchanged: ``added`` of their modules is
    then the term that an export adds to them (``automoe.hf.shards``).
    """
    for module in part.modules():
        if isinstance(adapter := getattr(module, "lora", None), Lora):
            _merge(module, "weight", adapter.A, adapter.B, adapter.scale)
        elif isinstance(adapter, ExpertLora):
            for name, number in (("gate_up_proj", "13"), ("down_proj", "2")):
                if (b := getattr(adapter, f"B{number}")) is not None:
                    _merge(module, name, getattr(adapter, f"A{number}"), b, adapter.scale)


def _merge(module: nn.Module, name: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """Add scale B [..., O, r] A [r, I] to weight [..., O, I] in place; experts have A [E, r, I]."""
    weight = module.get_parameter(name)
    local = local_shard(weight)
    packed = is_packed(weight)
    wide = torch.promote_types(b.dtype if packed else weight.dtype, torch.float32)
    spans = [
        slice(first, first + n) for first, n in zip(global_offset(weight), local.shape, strict=True)
    ]
    if packed:  # the last two dims hold one dim of columns
        blocks = spans[-2]
        size = block_size(weight)
        spans[-2:] = [slice(blocks.start * size, blocks.stop * size)]
    *outer, columns = spans
    whole_a, whole_b = (p.full_tensor() if isinstance(p, DTensor) else p for p in (a, b))
    mine_b = whole_b[tuple(outer)].to(wide)
    mine_a = (whole_a[outer[0]] if a.dim() == 3 else whole_a)[..., columns].to(wide)
    if packed:
        module.added = getattr(module, "added", {}) | {name: (mine_a, mine_b, scale)}
        return
    pairs = zip(local, mine_b, mine_a, strict=True) if a.dim() == 3 else [(local, mine_b, mine_a)]
    # Experts are merged one after the other, to avoid a wide copy of all of them.
    for matrix, each_b, each_a in pairs:
        matrix.copy_(torch.add(matrix.to(wide), each_b @ each_a, alpha=scale))
    local_shard(b).zero_()


def set_dropout_step(parts: Iterable[Decoder], step: int) -> None:
    """Set the step that decides which input features ``lora.dropout`` leaves out of adapters."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, Adapter):
                module.step = step
