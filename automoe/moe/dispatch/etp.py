"""Expert tensor parallelism: AG-V before the experts and RS-V after them, around any dispatcher.

Each rank of the etp group holds a slice of I of the same experts and has received rows of its own.
Rows go to the whole group, every rank computes with its slice, and the results are summed on the
rank that each row came from. Shapes: X rows to read from, R rows of this rank, G rows of the whole
group, P ranks of the etp axis, E experts of this rank, I their width, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from automoe.moe.dispatch.base import Dispatcher, DispatchGroup, RunExperts
from automoe.moe.dispatch.rows import RowExchange, run_received


@dataclass
class ExpertTensorDispatcher:
    """Wrapper of ``dispatcher`` for experts whose width is sharded over the etp group.

    It gathers the tokens of the group and reduce-scatters the outputs. Each call has one more host
    sync, for the sizes, unless the caller gives ``rows_per_expert``, the number of choices that
    every expert gets from every rank. Both collectives are made of all-to-alls, which take unequal
    sizes in every backend (gloo's own all-gather and reduce-scatter would need padding).

    Attributes:
        dispatcher: sends tokens to the ranks of their experts over ep.
        etp: the ranks that hold slices of the width of this rank's experts.
    """

    dispatcher: Dispatcher
    etp: DispatchGroup

    def __call__(
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None
    ) -> Tensor:
        num_ranks = self.etp.num_ranks

        def spread(x_XH, gather_idx_R, offsets_E, probs_R) -> Tensor:
            num_rows = gather_idx_R.shape[0]
            ends_E = offsets_E.to(torch.int64)
            counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
            if rows_per_expert is not None:  # all ranks of the group then have the same number
                counts_PE = counts_E.expand(num_ranks, -1)
                sizes = [num_rows] * num_ranks
            else:
                counts_PE = self.etp.all_gather(counts_E.unsqueeze(0))
                sizes = counts_PE.sum(1).tolist()
            received_P = counts_PE.sum(1)
            sent = [num_rows] * num_ranks
            counts_2P = torch.stack((torch.full_like(received_P, num_rows), received_P))
            source_GR = gather_idx_R.repeat(num_ranks)
            probs_G1 = probs_R.repeat(num_ranks).unsqueeze(1)
            exchange = RowExchange(self.etp, x_XH, source_GR, probs_G1, counts_2P, sent, sizes)
            out_GH = run_received(exchange, counts_PE, experts)
            terms = self.etp.all_to_all(out_GH, sent, sizes)
            return terms.unflatten(0, (num_ranks, num_rows)).sum(0)

        return self.dispatcher(x_TH, topk_ids_TK, probs_TK, spread, rows_per_expert)
