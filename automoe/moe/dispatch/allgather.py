"""All-gather and reduce-scatter: every rank of the ep axis sees every token. Simple, and the reference.

It sends E/K times the bytes of the all-to-all at one expert a rank.
Shapes: T tokens a rank (equal on all), K top-k, H hidden, P ranks of the ep axis, L experts a rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from automoe.moe.dispatch.base import Experts, group_ends, sort_by_expert, sum_to_tokens
from automoe.moe.dispatch.measure import on_host, stage, wait_if_timed
from automoe.parallel.collectives import all_gather, reduce_scatter


class AllGatherDispatcher:
    """Gathers tokens and routing, computes the part of this rank's experts, sums the parts.

    One host sync a call, for the number of rows to compute: without it there would have to be room, and
    elementwise work, for every choice of all ranks, P times what is computed on average.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.num_local = num_experts // self.num_ranks
        self.first_expert = dist.get_rank(group) * self.num_local

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Experts,
        rows_per_expert: int | None = None,
    ) -> torch.Tensor:
        top_k = ids.shape[1]
        with stage("all_gather"):
            all_x = wait_if_timed(all_gather(x, 0, self.group))
            all_weights = wait_if_timed(all_gather(weights, 0, self.group))
            all_ids = all_gather(ids, 0, self.group)

        with stage("permute"):
            mine = all_ids - self.first_expert
            elsewhere = (mine < 0) | (mine >= self.num_local)
            order, counts = sort_by_expert(mine.masked_fill(elsewhere, self.num_local), self.num_local)
            if rows_per_expert is None:
                num_rows = on_host(counts.sum())
            else:
                num_rows = rows_per_expert * self.num_local * self.num_ranks
            order = order[:num_rows]
            token_idx = order // top_k
            probs = all_weights.flatten()[order]
        rows = experts(all_x, token_idx, group_ends(counts), probs)
        with stage("unpermute"):
            partial = sum_to_tokens(rows, token_idx, all_x.shape[0])
        with stage("reduce_scatter"):
            return wait_if_timed(reduce_scatter(partial, 0, self.group))
