"""Adapters that are added to weights on their way out: exports, and weights for engines.

Letters: I input and O output features, r rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from automoe.comm.local_shard import global_offset, local_shard
from automoe.interop.torch_private import full_tensor
from automoe.model.causal_lm import CausalLM
from automoe.model.lora import Lora
from automoe.moe.lora import Added, ExpertLora
from automoe.quantize.packed import block_size, is_packed


def adapters_of(parts: Mapping[int, CausalLM]) -> dict[str, Added]:
    """Return what adapters add to this rank's shards, by the name of the weight. Collective."""
    return {
        f"{path}.{name}": added_product(module.get_parameter(name), a, b, module.lora.scale)
        for part in parts.values()
        for path, module, name, a, b in _adapted_weights(part)
    }


def _adapted_weights(part: CausalLM) -> Iterator[tuple[str, nn.Module, str, Tensor, Tensor]]:
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
