"""Expert tensor parallelism: AG-V before the experts and RS-V after them, around any dispatcher.

Each rank of the etp group holds a slice of I of the same experts and has received rows of its own. Rows go
to the whole group, every rank computes with its slice, and the terms are summed on the rank they came from.
Shapes: X rows to read from, R rows of this rank, G rows of the whole group, P ranks of the etp axis, E experts
of this rank, H hidden.
"""

from __future__ import annotations

import torch

from automoe.moe.dispatch.base import Dispatcher, DispatchGroup, Experts, group_ends, regroup_by_expert
from automoe.moe.dispatch.measure import on_host, stage


class ExpertTensorDispatcher:
    """``dispatcher`` with its experts spread over the etp group. One more host sync a call, for the sizes.

    The all-gather and reduce-scatter of unequal parts are made of all-to-alls, which take unequal sizes in
    every backend (gloo's own would need padding).
    """

    def __init__(self, dispatcher: Dispatcher, etp: DispatchGroup) -> None:
        self.dispatcher, self.etp = dispatcher, etp

    def __call__(self, x_TH, topk_ids_TK, weights_TK, experts: Experts, rows_per_expert=None) -> torch.Tensor:
        def spread(x_XH, gather_idx_R, offsets_E, probs_R):
            return self._run(x_XH, gather_idx_R, offsets_E, probs_R, experts, even=rows_per_expert is not None)

        return self.dispatcher(x_TH, topk_ids_TK, weights_TK, spread, rows_per_expert)

    def _run(
        self,
        x_XH: torch.Tensor,
        gather_idx_R: torch.Tensor,
        offsets_E: torch.Tensor,
        probs_R: torch.Tensor,
        experts: Experts,
        even: bool,
    ) -> torch.Tensor:
        """``even``: all ranks of the group have the same number of rows for each expert."""
        num_ranks, num_rows = self.etp.num_ranks, gather_idx_R.shape[0]
        with stage("all_gather"):
            ends_E = offsets_E.to(torch.int64)
            counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
            if even:
                counts_PE, sizes = counts_E.expand(num_ranks, -1), [num_rows] * num_ranks
            else:
                counts_PE = self.etp.all_gather(counts_E.unsqueeze(0))
                sizes = on_host(counts_PE.sum(1))
        with stage("permute"):
            rows_RH = x_XH.index_select(0, gather_idx_R)
        with stage("all_gather"):
            rows_GH = self._gather(rows_RH, sizes)
            probs_G = self._gather(probs_R.unsqueeze(1), sizes).squeeze(1)

        with stage("permute"):
            by_expert_G, back_G = regroup_by_expert(counts_PE, rows_GH.shape[0])
            probs_G = probs_G[by_expert_G]
        out_GH = experts(self.etp.wait(rows_GH), by_expert_G, group_ends(counts_PE.sum(0)), probs_G)
        with stage("unpermute"):
            out_GH = out_GH.index_select(0, back_G)
        with stage("reduce_scatter"):
            terms = self.etp.all_to_all(out_GH, [num_rows] * num_ranks, sizes)
            return terms.unflatten(0, (num_ranks, num_rows)).sum(0)

    def _gather(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """[R, ...] of each rank -> [sum of sizes, ...], rank after rank."""
        num_ranks = self.etp.num_ranks
        return self.etp.all_to_all(x.repeat(num_ranks, 1), sizes, [x.shape[0]] * num_ranks)
