"""LoRA adapters merged into weights that leave training: exports, and weights for engines.

Letters: I input and O output features, r rank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from automoe.comm.local_shard import global_offset, local_shard
from automoe.interop.torch_private import full_tensor
from automoe.model.causal_lm import CausalLM
from automoe.model.lora import Lora
from automoe.moe.lora import Added, ExpertLora
from automoe.quantize.packed import block_size, is_packed


def adapters_of(parts: Mapping[int, CausalLM]) -> dict[str, Callable[[], Added]]:
    """Return a function for each adapted weight, by name, that gathers its LoRA factors.

    A function returns (A, B, scale): the columns of A and rows of B for this rank's shard of the
    weight, to which an export adds scale B A. Functions are collective: all ranks of a pipeline
    stage call them in the same order. Results of the last two weights are cached.

    Args:
        parts: this rank's pipeline stages by number.
    """
    adapted = {
        f"{path}.{name}": (module.get_parameter(name), a, b, module.lora.scale)
        for part in parts.values()
        for path, module, name, a, b in _adapted_weights(part)
    }

    @lru_cache(maxsize=2)  # the checkpoint's tensors of an expert alternate between two weights
    def gathered(key: str) -> Added:
        return added_product(*adapted[key])

    return {key: partial(gathered, key) for key in adapted}


def _adapted_weights(part: CausalLM) -> Iterator[tuple[str, nn.Module, str, Tensor, Tensor]]:
    """Yield the LoRA adapter of each adapted weight of a pipeline stage.

    Yields:
        (module's name, module, name of its adapted parameter, factor A, factor B).
    """
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
    """Return the parts of LoRA's A and B that act on this rank's shard of ``weight``. Collective.

    Args:
        weight: [..., O, I], maybe a packed 8- or 4-bit matrix.
        a, b: whole or sharded factors [r, I] or [E, r, I], and [..., O, r].
        scale: factor of B A, returned unchanged.

    Returns:
        (columns of A and rows of B that act on the shard, both at least in float32; scale).
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
    """Add scale B A to ``into`` [..., O, I] in place, for an adapter of rank r.

    B is [..., O, r] and A [r, I] or, for E experts, [E, r, I]. Matrices are multiplied one by one,
    so rounding does not depend on their number. If A lacks inner dims of B (gate and up), all
    matrices along them share one A.
    """
    if b.dim() == 2:
        into.add_(b @ a, alpha=scale)
        return
    for k in range(b.shape[0]):
        add_low_rank(into[k], a[k] if a.dim() == 3 else a, b[k], scale)
