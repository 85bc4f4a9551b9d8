"""Dropless all-to-all: permute, A2A-V over ep, experts, A2A-V back, unpermute.

Shapes: T tokens, K top-k, H hidden, E experts, P ranks of the ep axis, L = E / P experts of this
rank, M rows sent (T K without dropping), R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from automoe.moe.dispatch.base import DispatchGroup, RunExperts, sort_by_expert, sum_to_tokens
from automoe.moe.dispatch.rows import RowExchange, run_received


@dataclass
class AllToAllDispatcher:
    """Dispatcher that sends every (token, expert) pair with its routing weight to the expert's rank.

    Each call has one host sync, for the number of pairs to receive, or none if the caller gives
    ``rows_per_expert``, the number of choices that every expert gets from every rank.

    Attributes:
        num_experts: number of experts of all ranks.
        ep: the ranks over which experts are sharded, each with an equal number of consecutive
            experts.
    """

    num_experts: int
    ep: DispatchGroup

    def __call__(
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None
    ) -> Tensor:
        order_M, counts_E = sort_by_expert(topk_ids_TK, self.num_experts)
        counts_PL, counts_2P, sent, received = self._sizes(counts_E, rows_per_expert)
        order_M = order_M[: sum(sent)]  # dropped choices come last
        token_idx_M = order_M // topk_ids_TK.shape[1]
        probs_M1 = probs_TK.flatten()[order_M].unsqueeze(1)
        exchange = RowExchange(self.ep, x_TH, token_idx_M, probs_M1, counts_2P, sent, received)
        out_RH = run_received(exchange, counts_PL, experts)
        out_MH = self.ep.all_to_all(out_RH, sent, received)
        return sum_to_tokens(out_MH, token_idx_M, x_TH.shape[0])

    def _sizes(self, counts_E: Tensor, rows_per_expert: int | None):
        """Exchange the numbers of (token, expert) pairs ("rows") that ranks send to one another.

        Args:
            counts_E: this rank's rows for each expert of all ranks.
            rows_per_expert: rows of each rank for each expert if these numbers are all equal; None:
                the counts are exchanged.

        Returns:
            Tensor [P, L]: rows from each of P ranks for each of this rank's L experts. Tensor
            [2, P]: rows that this rank sends to each rank, and rows that it receives from each. Two
            lists of P ints on the host: the sent and the received numbers of that tensor.
        """
        num_ranks = self.ep.num_ranks
        if rows_per_expert is not None:
            sizes = [rows_per_expert * self.num_experts // num_ranks] * num_ranks
            counts_PL = torch.full_like(counts_E, rows_per_expert).view(num_ranks, -1)
            return counts_PL, counts_PL.sum(1).expand(2, -1), sizes, sizes
        counts_PL = self.ep.exchange_counts(counts_E).view(num_ranks, -1)
        counts_2P = torch.stack((counts_E.view(num_ranks, -1).sum(1), counts_PL.sum(1)))
        return counts_PL, counts_2P, *counts_2P.tolist()
