"""Hierarchical all-to-all: a token goes once to each node that holds any of its experts.

Within the node it then goes once to each rank that holds any of its experts. Across nodes a rank
exchanges with the ranks at its own place in the other nodes, so that all network cards of a node
work. With routing limited to G groups of experts, one group per node, a token is sent to at most G
nodes, where plain all-to-all sends one copy per choice. Results come back the same way: one partial
sum per token and rank, then one per token and node. Shapes: T tokens, K top-k, H hidden, E experts,
P ranks of a level, M copies sent, R copies and B lines received, C = 2 K metadata of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automoe.moe.dispatch.base import (
    DispatchGroup,
    RunExperts,
    count_choices,
    run_choices,
    sort_by_expert,
    sum_to_tokens,
)
from automoe.moe.dispatch.rows import RowExchange


class HierarchicalDispatcher:
    """Dispatcher over two levels of ranks: first across nodes, then within a node.

    Each level has one host sync, for the sizes, or none if the caller gives ``rows_per_expert``.

    Args:
        levels: the group across nodes, then the group within the node; either may be left out.
            Each rank of a level has an equal number of consecutive experts.
    """

    def __init__(self, num_experts: int, levels: Sequence[DispatchGroup]) -> None:
        self.num_experts = num_experts
        self.group, *inner = levels
        per_part = num_experts // self.group.num_ranks
        self.inner = HierarchicalDispatcher(per_part, inner) if inner else None

    def __call__(
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None
    ) -> Tensor:
        """Return each token's weighted sum over its chosen experts on all ranks: [T, H].

        Tokens go over the first level's group, then over the other levels. Expert ids outside 0 ...
        E - 1 are dropped.

        Args:
            experts: function that runs this rank's experts.
            rows_per_expert: choices of each expert on this rank if all are equal; None: sizes are
                exchanged.
        """
        group = self.group
        num_parts = group.num_ranks
        top_k = topk_ids_TK.shape[1]
        num_local = self.num_experts // num_parts
        part_TK = topk_ids_TK.div(num_local, rounding_mode="floor").clamp(max=num_parts)
        # If a token has several choices in one part, the first stands for all of them.
        again_TK = (part_TK.unsqueeze(2) == part_TK.unsqueeze(1)).tril(-1).any(2)
        order_M, copies_P = sort_by_expert(part_TK.masked_fill(again_TK, num_parts), num_parts)
        choices_P = count_choices(part_TK, num_parts)
        if rows_per_expert is None:
            theirs_P2 = group.exchange_counts(
                torch.stack((copies_P, choices_P), dim=1).flatten()
            ).view(num_parts, 2)
            counts_2P = torch.stack((copies_P, theirs_P2[:, 0]))
            *sizes, choices = torch.cat(
                (counts_2P.flatten(), theirs_P2[:, 1].sum(0, keepdim=True))
            ).tolist()
            sent = sizes[:num_parts]
            received = sizes[num_parts:]
        else:  # tokens have one choice each
            sent = received = [rows_per_expert * num_local] * num_parts
            counts_2P = torch.full_like(copies_P, sent[0]).expand(2, -1)
            choices = sum(received)
            rows_per_expert *= num_parts
        token_idx_M = order_M[: sum(sent)] // top_k
        # Expert ids travel as floats: float32 holds them exactly up to 2^24.
        meta_TC = torch.cat((probs_TK, topk_ids_TK.to(probs_TK.dtype)), dim=1)
        meta_MC = meta_TC[token_idx_M]
        exchange = RowExchange(group, x_TH, token_idx_M, meta_MC, counts_2P, sent, received)
        x_BH, meta_RC = exchange.wait()
        ids_RK = meta_RC[:, top_k:].to(torch.int64) - group.rank * num_local
        ids_RK = ids_RK.masked_fill((ids_RK < 0) | (ids_RK >= num_local), num_local)
        # A line of metadata counts as a token without a choice.
        ids_BK = ids_RK.new_full((x_BH.shape[0], top_k), num_local).index_copy_(
            0, exchange.into.row_M, ids_RK
        )
        probs_BK = meta_RC.new_zeros(x_BH.shape[0], top_k).index_copy(
            0, exchange.into.row_M, meta_RC[:, :top_k]
        )
        if self.inner is not None:
            out_BH = self.inner(x_BH, ids_BK, probs_BK, experts, rows_per_expert)
        else:
            out_BH = run_choices(x_BH, ids_BK, probs_BK, experts, num_local, choices)
        out_BH = group.all_to_all(out_BH, exchange.out.splits, exchange.into.splits)
        return sum_to_tokens(out_BH, exchange.source_B, x_TH.shape[0])
