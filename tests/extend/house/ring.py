"""Tokens visit the ranks of the ep axis one after the other, and their sums travel with them.

T tokens of a rank, K top-k, H hidden, L experts of this rank, R rows that they compute.
"""

from functools import partial

import torch

from automoe.moe.dispatch.base import DispatchGroup, group_ends, sort_by_expert, sum_to_tokens


class RingDispatcher:
    def __init__(self, num_experts: int, ep: DispatchGroup) -> None:
        self.ep, self.num_local = ep, num_experts // ep.num_ranks

    def __call__(self, x_TH, topk_ids_TK, weights_TK, experts, rows_per_expert=None) -> torch.Tensor:
        y_TH = torch.zeros_like(x_TH)
        for _ in range(self.ep.num_ranks):
            ids_TK = topk_ids_TK - self.ep.rank * self.num_local
            ids_TK = ids_TK.masked_fill((ids_TK < 0) | (ids_TK >= self.num_local), self.num_local)
            order_R, counts_L = sort_by_expert(ids_TK, self.num_local)
            order_R = order_R[: int(counts_L.sum())]
            token_idx_R = order_R // ids_TK.shape[1]
            rows_RH = experts(x_TH, token_idx_R, group_ends(counts_L), weights_TK.flatten()[order_R])
            y_TH = y_TH + sum_to_tokens(rows_RH, token_idx_R, len(x_TH))
            x_TH, y_TH, weights_TK, topk_ids_TK = map(self.pass_on, (x_TH, y_TH, weights_TK, topk_ids_TK))
        return y_TH

    def pass_on(self, x: torch.Tensor) -> torch.Tensor:
        size, rank, num_ranks = len(x), self.ep.rank, self.ep.num_ranks
        to = [size * (other == (rank + 1) % num_ranks) for other in range(num_ranks)]
        source = [size * (other == (rank - 1) % num_ranks) for other in range(num_ranks)]
        return self.ep.wait(self.ep.all_to_all(x, source, to))


def make_ring(ep: DispatchGroup):
    return partial(RingDispatcher, ep=ep)
