"""Expert tensor parallelism: AG-V before the experts, RS-V after them, around any dispatcher.

Each rank of the etp group holds a slice of I of the same experts and has received rows of its own. Rows go
to the whole group, every rank computes with its slice, and the terms are summed on the rank they came from.
Shapes: R rows of this rank, P ranks of the etp axis, E experts of this rank, H hidden.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from automoe.moe.dispatch.base import Dispatcher, Experts, group_ends, regroup_by_expert
from automoe.moe.dispatch.measure import on_host, stage, wait_if_timed
from automoe.parallel.collectives import all_to_all


class ExpertTensorDispatcher:
    """``dispatcher`` with its experts spread over the etp group. One more host sync a call, for the sizes.

    The all-gather and reduce-scatter of unequal parts are built from all-to-alls, which every backend
    has with unequal sizes (gloo's own would have to be padded).
    """

    def __init__(self, dispatcher: Dispatcher, group: dist.ProcessGroup) -> None:
        self.dispatcher, self.group = dispatcher, group
        self.num_ranks = dist.get_world_size(group)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Experts,
        rows_per_expert: int | None = None,
    ) -> torch.Tensor:
        def spread(rows: torch.Tensor, gather_idx: torch.Tensor, offsets: torch.Tensor, probs: torch.Tensor):
            return self._run(rows, gather_idx, offsets, probs, experts, even=rows_per_expert is not None)

        return self.dispatcher(x, ids, weights, spread, rows_per_expert)

    def _run(
        self,
        x: torch.Tensor,
        gather_idx: torch.Tensor,
        offsets: torch.Tensor,
        probs: torch.Tensor,
        experts: Experts,
        even: bool,
    ) -> torch.Tensor:
        """``even``: all ranks of the group have the same number of rows for each expert."""
        mine = gather_idx.shape[0]
        with stage("all_gather"):
            ends = offsets.to(torch.int64)
            counts = ends.diff(prepend=ends.new_zeros(1))
            if even:
                table, sizes = counts.expand(self.num_ranks, -1), [mine] * self.num_ranks  # [P, E]
            else:
                all_counts = [torch.empty_like(counts) for _ in range(self.num_ranks)]
                dist.all_gather(all_counts, counts, group=self.group)
                table = torch.stack(all_counts)
                sizes = on_host(table.sum(1))
        with stage("permute"):
            own = x.index_select(0, gather_idx)
        with stage("all_gather"):
            rows = self._gather(own, sizes)
            all_probs = self._gather(probs.unsqueeze(1), sizes).squeeze(1)

        with stage("permute"):
            by_expert, back = regroup_by_expert(table, rows.shape[0])
            all_probs = all_probs[by_expert]
        out = experts(rows, by_expert, group_ends(table.sum(0)), all_probs)
        with stage("unpermute"):
            out = out.index_select(0, back)
        with stage("reduce_scatter"):
            terms = wait_if_timed(all_to_all(out, [mine] * self.num_ranks, sizes, self.group))
            return terms.unflatten(0, (self.num_ranks, mine)).sum(0)

    def _gather(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """[R, ...] of each rank -> [sum of sizes, ...], rank after rank."""
        return wait_if_timed(all_to_all(x.repeat(self.num_ranks, 1), sizes, [x.shape[0]] * self.num_ranks, self.group))
