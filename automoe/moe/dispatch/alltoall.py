"""Dropless all-to-all: permute, A2A-V over ep, experts, A2A-V back, unpermute.

Shapes: T tokens, K top-k, H hidden, P ranks of the ep axis, L = E / P experts a rank,
M = T K rows sent, N rows received.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from automoe.moe.dispatch.base import Experts, group_ends, regroup_by_expert, sort_by_expert, sum_to_tokens
from automoe.moe.dispatch.measure import on_host, stage, wait_if_timed
from automoe.parallel.collectives import all_to_all


class AllToAllDispatcher:
    """Each chosen (token, expert) pair travels once, to the rank that holds the expert.

    One host sync a call: the number of rows to receive sizes the buffer. None where ``rows_per_expert`` does.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        self.num_experts, self.group = num_experts, group
        self.num_ranks = dist.get_world_size(group)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Experts,
        rows_per_expert: int | None = None,
    ) -> torch.Tensor:
        with stage("permute"):
            order, counts = sort_by_expert(ids, self.num_experts)
        with stage("a2a_dispatch"):
            received, sent_splits, received_splits = self._sizes(counts, rows_per_expert)
        with stage("permute"):
            order = order[: sum(sent_splits)]  # dropped choices lie behind
            token_idx = order // ids.shape[1]
            chosen = x.index_select(0, token_idx)
            chosen_weights = weights.flatten()[order].unsqueeze(1)
        with stage("a2a_dispatch"):
            rows = self._exchange(chosen, received_splits, sent_splits)
            probs = self._exchange(chosen_weights, received_splits, sent_splits).squeeze(1)

        with stage("permute"):
            local = received.view(self.num_ranks, -1)
            by_expert, back = regroup_by_expert(local, rows.shape[0])
            probs = probs[by_expert]
        out = experts(rows, by_expert, group_ends(local.sum(0)), probs)

        with stage("unpermute"):
            out = out.index_select(0, back)
        with stage("a2a_combine"):
            returned = self._exchange(out, sent_splits, received_splits)
        with stage("unpermute"):
            return sum_to_tokens(returned, token_idx, x.shape[0])

    def _sizes(self, counts: torch.Tensor, rows_per_expert: int | None) -> tuple[torch.Tensor, list[int], list[int]]:
        """[P, L] flat: rows from each rank for each of my experts; rows sent to and received from each rank."""
        if rows_per_expert is not None:
            splits = [rows_per_expert * self.num_experts // self.num_ranks] * self.num_ranks
            return torch.full_like(counts, rows_per_expert), splits, splits
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        per_rank = torch.stack((counts.view(self.num_ranks, -1).sum(1), received.view(self.num_ranks, -1).sum(1)))
        sent_splits, received_splits = on_host(per_rank)
        return received, sent_splits, received_splits

    def _exchange(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int]) -> torch.Tensor:
        return wait_if_timed(all_to_all(rows, output_splits, input_splits, self.group))
