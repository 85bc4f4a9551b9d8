"""All-gather and reduce-scatter dispatch: every rank of the ep axis sees every token.

It is the simple reference for the other dispatchers. With one expert per rank it sends E/K times
the bytes of the all-to-all. Shapes: T tokens of a rank (equal on all), K top-k, H hidden, P ranks
of the ep axis, L experts of this rank, A = P T tokens of all ranks.
"""

from __future__ import annotations

from torch import Tensor

from automoe.moe.dispatch.base import DispatchGroup, RunExperts, run_choices
from automoe.moe.dispatch.wire import decode_arrived, encode_rows


class AllGatherDispatcher:
    """Dispatcher that gathers tokens and routing, and reduce-scatters the local experts' outputs.

    Each call has one host sync, for the number of (token, expert) pairs to compute, or none if the
    caller gives ``rows_per_expert``, the number of choices that every expert gets from every rank.
    A call that did not know the number of pairs would need memory and element-wise work for every
    choice of all P ranks: P times the average.

    Args:
        num_experts: number of experts of all ranks.
        ep: the P ranks over which experts are sharded, each with an equal number of consecutive
            experts.
    """

    def __init__(self, num_experts: int, ep: DispatchGroup) -> None:
        self.ep = ep
        self.num_local = num_experts // ep.num_ranks
        self.first_expert = ep.rank * self.num_local

    def __call__(
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None
    ) -> Tensor:
        if self.ep.in_8_bits:
            lines_AW = self.ep.all_gather(encode_rows(x_TH))
            x_AH = decode_arrived(x_TH, lines_AW, self.ep.reduce_scatter)
        else:
            x_AH = self.ep.all_gather(x_TH)
        probs_AK = self.ep.all_gather(probs_TK)
        topk_ids_AK = self.ep.all_gather(topk_ids_TK)

        local_ids_AK = topk_ids_AK - self.first_expert
        elsewhere_AK = (local_ids_AK < 0) | (local_ids_AK >= self.num_local)
        local_ids_AK = local_ids_AK.masked_fill(elsewhere_AK, self.num_local)
        num_rows = (
            None
            if rows_per_expert is None
            else rows_per_expert * self.num_local * self.ep.num_ranks
        )

        def wait_and_run(x_AH: Tensor, *routing: Tensor) -> Tensor:
            return experts(self.ep.wait(x_AH), *routing)

        partial_AH = run_choices(
            x_AH, local_ids_AK, probs_AK, wait_and_run, self.num_local, num_rows
        )
        return self.ep.reduce_scatter(partial_AH)
