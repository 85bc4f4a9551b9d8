"""QK-clip: scales down the weights of heads whose attention logits grow too large, after a step.

Together with Muon this is MuonClip (Kimi K2, arXiv 2507.20534, section 2.1). Letters: B rows, S
positions of queries, R of keys, N query heads of this rank, G key heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from automoe.comm.communicators import first_of_rank
from automoe.comm.local_shard import global_offset, local_shard
from automoe.model.attention import AttentionSetup, GroupedQueryAttention
from automoe.model.rows import gather_row
from automoe.passes.recompute import is_counted

CHUNK = 512  # queries whose logits are in memory at once


class WatchedAttention:
    """Wrapper of ``AttentionSetup.softmax_attention`` that records largest logits, for QK-clip.

    It records in training passes, not in recomputations, and leaves out queries of padding. The
    logits are computed a second time, since no attention kernel returns them.

    Attributes:
        largest: [n], largest logit of each of the n heads computed here since the last
            ``take_largest_logits``; None: no training pass yet.
        first: number of the first of these heads among the heads of this tp rank.
    """

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.largest: Tensor | None = None
        self.first = 0  # number, among this tp rank's heads, of the first one computed here

    def __call__(
        self,
        setup: AttentionSetup,
        q_BSND: Tensor,
        k_BRGD: Tensor,
        v_BRGD: Tensor,
        scale: float,
        window: int = 0,
        sinks_N: Tensor | None = None,
        chosen_BSR: Tensor | None = None,
    ) -> Tensor:
        if is_counted():
            self.first = setup.head_exchange.rank * q_BSND.shape[2]
            valid_BS = gather_row(setup.tokens.valid.int(), setup.head_exchange) > 0
            for queries, keys, mask in setup.query_blocks(window, chosen_BSR):
                block = q_BSND.detach()[:, queries], k_BRGD.detach()[:, keys]
                assert not isinstance(mask, BlockMask), "refused by the rules"
                largest = largest_logits(*block, mask, scale, valid_BS[:, queries])
                self.largest = largest if self.largest is None else self.largest.maximum(largest)
        return self.attention(setup, q_BSND, k_BRGD, v_BRGD, scale, window, sinks_N, chosen_BSR)


@torch.no_grad()
def largest_logits(
    q_BSND: Tensor, k_BRGD: Tensor, mask: Tensor | None, scale: float, valid_BS: Tensor
) -> Tensor:
    """Return [N], the largest attention logit of each query head over valid queries and keys they see.

    Args:
        mask: [B, 1, S, R], True where a query sees a key; None for plain causality.
        scale: factor of the products of queries and keys.
        valid_BS: True for queries that are not padding; if all are padding, the result is -inf.
    """
    num_queries, num_heads = q_BSND.shape[1:3]
    k_BNDR = k_BRGD.repeat_interleave(num_heads // k_BRGD.shape[2], 2).permute(0, 2, 3, 1)
    positions = torch.arange(k_BRGD.shape[1], device=q_BSND.device)
    largest = []
    for first in range(0, num_queries, CHUNK):
        rows = slice(first, first + CHUNK)
        logits_BNSR = q_BSND[:, rows].transpose(1, 2) @ k_BNDR
        seen = positions <= positions[rows, None] if mask is None else mask[:, :, rows]
        seen = seen & valid_BS[:, None, rows, None]
        largest.append(logits_BNSR.masked_fill(~seen, -math.inf).amax((0, 2, 3)))
    return torch.stack(largest).amax(0).to(torch.promote_types(q_BSND.dtype, torch.float32)) * scale


@dataclass(frozen=True)
class LargestLogits:
    """Largest attention logits of a step, which ``clip_logits`` takes.

    Attributes:
        modules: attention modules of this rank whose logits were recorded.
        by_head: [modules, heads] largest logit of each query head of all tp ranks.
    """

    modules: list[Any]  # GroupedQueryAttention and LatentAttention
    by_head: Tensor  # [modules, num_heads]

    def largest(self) -> float:
        return float(self.by_head.max()) if self.modules else -math.inf


def take_largest_logits(
    model_parts: Iterable[nn.Module], ranks: dist.ProcessGroup | None, device: torch.device
) -> LargestLogits:
    """Return each query head's largest attention logit of the step, and reset the modules' records.

    ``by_head`` of the result [modules, heads] has a row for each attention module of this rank that
    recorded logits, with the heads of all tp ranks: maxima over micro-batches and over ``ranks``.
    Collective over ``ranks``.

    Args:
        ranks: group of the pipeline stage's ranks; None: this rank alone.
        device: device of ``by_head`` if no module recorded logits; its shape is then [0, 0].
    """
    modules = (module for part in model_parts for module in part.modules())
    watched: list[Any] = [
        module
        for module in modules
        if isinstance(core := getattr(module, "core_attention", None), WatchedAttention)
        and core.largest is not None  # a module for multi-token prediction may sit out a step
    ]
    rows = []
    for module in watched:
        largest, module.core_attention.largest = module.core_attention.largest, None
        first = first_of_rank(module.tp, module.num_heads) + module.core_attention.first
        row = largest.new_full((module.num_heads,), -math.inf)
        row[first : first + len(largest)] = largest
        rows.append(row)
    by_head = torch.stack(rows) if rows else torch.zeros(0, 0, device=device)
    if ranks is not None and rows:
        dist.all_reduce(by_head, op=dist.ReduceOp.MAX, group=ranks)
    return LargestLogits(watched, by_head)


@torch.no_grad()
def clip_logits(logits: LargestLogits, limit: float) -> None:
    """Scale the query and key weights so that no head's logit on the same batch exceeds ``limit``.

    ``logits`` has each head's largest logit of the step (``take_largest_logits``), and gamma =
    min(1, limit / largest logit). A head with keys of its own gets
    W_q <- gamma^alpha W_q and W_k <- gamma^(1 - alpha) W_k with alpha = 0.5 (Kimi K2, section 2.1).
    In latent attention this holds for the parts of queries and keys without rotation; the rotary
    part of queries is scaled by gamma, because all heads share its keys (algorithm 1). In
    grouped-query attention heads share keys too, so queries are scaled by gamma.
    """
    for module, largest in zip(logits.modules, logits.by_head, strict=True):
        gamma = torch.where(largest > limit, limit / largest, 1.0)
        if isinstance(module, GroupedQueryAttention):
            gate = [torch.ones_like(gamma)] * module.head_dim * module.output_gate
            if own_keys := module.num_kv_heads == module.num_heads:
                gamma = gamma.sqrt()
            rows = [gamma] * module.head_dim
            _scale_rows(module.q_proj, torch.stack(rows + gate, 1))
            if own_keys:
                _scale_rows(module.k_proj, torch.stack(rows, 1))
            continue
        root = [gamma.sqrt()] * module.nope_dim
        queries = module.q_proj if module.q_lora_rank is None else module.q_b_proj
        _scale_rows(queries, torch.stack(root + [gamma] * module.rope_dim, 1))
        values = [torch.ones_like(gamma)] * module.v_dim
        _scale_rows(module.kv_b_proj, torch.stack(root + values, 1))


def _scale_rows(linear: nn.Module, factors: Tensor) -> None:
    """Multiply the rows of a projection's weight, and its bias, by ``factors`` [heads, rows of a head], in place.

    Factors are given for the heads of all tp ranks; this rank uses those of its shard. Frozen
    parameters are left unchanged.
    """
    for parameter in linear.parameters():
        if parameter.requires_grad:
            shard, first = local_shard(parameter), global_offset(parameter)[0]
            rows = factors.flatten()[first : first + len(shard)].to(shard.dtype)
            shard.mul_(rows.view(-1, *[1] * (shard.dim() - 1)))
