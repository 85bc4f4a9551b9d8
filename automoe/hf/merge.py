"""Adapters merged into the weights that they adapt, for exports and weights on their way out.

Letters: I input and O output features, r rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from automoe.comm.local_shard import global_offset, local_shard
from automoe.interop.torch_private import full_tensor
from automoe.model.causal_lm import CausalLM
from automoe.model.lora import Lora, LoRALinear
from automoe.moe.lora import Added, ExpertLora, LoRAExperts
from automoe.quantize.packed import block_size, is_packed


@torch.no_grad()
def merge_adapters(part: CausalLM) -> None:
    """Add the adapters' products to the weights, and set every B to zero. Collective.

    The sum is computed in at least float32 and rounded once to the weight's dtype; each rank merges
    its shard of a weight. Packed weights and their B stay unchanged: ``added`` of their modules is
    then the term that an export adds to them (``automoe.hf.shards``).
    """
    for _, module, name, a, b in adapted_weights(part):
        weight = module.get_parameter(name)
        added = added_product(weight, a, b, module.lora.scale)
        if is_packed(weight):
            assert isinstance(module, LoRALinear | LoRAExperts)
            module.added[name] = added
            continue
        mine_a, mine_b, scale = added
        # Experts are merged one after the other, to avoid a wide copy of all of them.
        for k in range(len(mine_a)) if a.dim() == 3 else (...,):
            matrix = local_shard(weight)[k]
            wide = matrix.to(mine_b.dtype, copy=True)
            add_low_rank(wide, mine_a[k], mine_b[k], scale)
            matrix.copy_(wide)
        local_shard(b).zero_()


def adapted_weights(part: CausalLM) -> Iterator[tuple[str, nn.Module, str, Tensor, Tensor]]:
    """Yield path of the module, module, parameter name, A and B of each weight with an adapter."""
    for path, module in part.named_modules():
        adapter = getattr(module, "lora", None)
        if isinstance(adapter, Lora):
            yield path, module, "weight", adapter.A, adapter.B
        elif isinstance(adapter, ExpertLora):
            for name, number in (("gate_up_proj", "13"), ("down_proj", "2")):
                if (b := getattr(adapter, f"B{number}")) is not None:
                    yield path, module, name, getattr(adapter, f"A{number}"), b


@torch.no_grad()
def added_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Added:
    """Return what of an adapter is added to this rank's shard of ``weight`` [..., O, I]. Collective.

    Returns:
        A [r, I] or [E, r, I] and B [..., O, r] of the shard, at least in float32, and the scale.
    """
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
    whole_a, whole_b = full_tensor(a), full_tensor(b)
    mine_b = whole_b[tuple(outer)].to(wide)
    mine_a = (whole_a[outer[0]] if a.dim() == 3 else whole_a)[..., columns].to(wide)
    return mine_a, mine_b, scale


def add_low_rank(into: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Add scale B [..., O, r] A [..., r, I] to ``into`` [..., O, I].

    Matrices are multiplied one by one, so that no bit depends on their number. If ``a`` lacks inner
    dims of ``b``, several matrices of ``b`` share one of ``a``.
    """
    if b.dim() == 2:
        into.add_(b @ a, alpha=scale)
        return
    for k in range(b.shape[0]):
        add_low_rank(into[k], a[k] if a.dim() == 3 else a, b[k], scale)
