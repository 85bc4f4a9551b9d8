"""Hierarchical all-to-all: a token goes once to each node that holds any of its experts.

Within the node it then goes once to each rank that holds any of its experts. Across nodes a rank
exchanges with the ranks of the same local rank in the other nodes, so that all network cards of a node
work. With routing limited to G groups of experts, one group per node, a token is sent to at most G
nodes, where plain all-to-all sends one copy per choice. Results come back the same way: one partial
sum per token and rank, then one per token and node. Shapes: T tokens, K top-k, H hidden, E experts,
P ranks of a level, M copies sent, R copies received in a buffer of B lines, C = 2 K metadata of a copy.
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

    Each level has one host sync, for the sizes, or none if the caller gives ``rows_per_expert``, the
    number of choices that every expert gets from every rank.

    Args:
        num_experts: number of experts of all ranks of the levels together.
        levels: the group across nodes, then the group within the node; either may be left out.
            Each rank of a level has an equal number of consecutive experts.
    """

    def __init__(self, num_experts: int, levels: Sequence[DispatchGroup]) -> None:
        self.group, *inner = levels
        self.num_local = num_experts // self.group.num_ranks
        self.inner = HierarchicalDispatcher(self.num_local, inner) if inner else None

    def __call__(
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None
    ) -> Tensor:
        """Return each token's sum over its K choices of probs * expert(x): [T, H].

        Tokens are sent over the first level's group, then over the other levels' groups; results
        come back the same way.

        Args:
            x_TH: this rank's tokens.
            topk_ids_TK: int64, chosen experts, numbered over all E; other ids are dropped choices.
            probs_TK: routing weights.
            experts: function that runs this rank's experts on rows sorted by expert.
            rows_per_expert: number of choices that every expert gets from every rank; None:
                unknown.
        """
        group = self.group
        num_tokens, top_k = topk_ids_TK.shape
        order_M, copies_P, choices_P = self._copies(topk_ids_TK)
        counts_2P, sent, received, choices = self._sizes(copies_P, choices_P, rows_per_expert)
        token_idx_M = order_M[: sum(sent)] // top_k
        # Expert ids travel as floats: float32 holds them exactly up to 2^24.
        meta_TC = torch.cat((probs_TK, topk_ids_TK.to(probs_TK.dtype)), dim=1)
        meta_MC = meta_TC[token_idx_M]
        exchange = RowExchange(group, x_TH, token_idx_M, meta_MC, counts_2P, sent, received)
        x_BH, meta_RC = exchange.wait()
        ids_BK, probs_BK = self._routing(meta_RC, exchange.receive_layout.line_M, x_BH.shape[0])
        if self.inner is not None:
            if rows_per_expert is not None:
                rows_per_expert *= group.num_ranks
            out_BH = self.inner(x_BH, ids_BK, probs_BK, experts, rows_per_expert)
        else:
            out_BH = run_choices(x_BH, ids_BK, probs_BK, experts, self.num_local, choices)
        sent_lines, received_lines = exchange.send_layout.splits, exchange.receive_layout.splits
        out_BH = group.all_to_all(out_BH, sent_lines, received_lines)
        return sum_to_tokens(out_BH, exchange.token_idx_B, num_tokens)

    def _copies(self, topk_ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which (token, expert) choices send a copy of their token, and counts per rank of ``self.group``.

        A token sends one copy to each of the group's P ranks that holds any of its chosen experts
        ``topk_ids_TK``.

        Returns:
            [T K] int64 indices of choices: first those that send a copy, sorted by rank; [P] copies
            for each rank; [P] choices of each rank's experts.
        """
        num_parts = self.group.num_ranks
        part_TK = topk_ids_TK.div(self.num_local, rounding_mode="floor").clamp(max=num_parts)
        # If a token has several choices in one part, the first stands for all of them.
        again_TK = (part_TK.unsqueeze(2) == part_TK.unsqueeze(1)).tril(-1).any(2)
        order_M, copies_P = sort_by_expert(part_TK.masked_fill(again_TK, num_parts), num_parts)
        return order_M, copies_P, count_choices(part_TK, num_parts)

    def _sizes(
        self, copies_P: Tensor, choices_P: Tensor, rows_per_expert: int | None
    ) -> tuple[Tensor, list[int], list[int], int]:
        """Return how many copies of tokens this rank sends to and receives from each rank of its group.

        A token is sent once, as one copy, to each rank that has any of its experts.

        Args:
            copies_P: copies that this rank sends to each of the P ranks.
            choices_P: how often this rank's tokens chose an expert of each rank.
            rows_per_expert: number of choices that every expert gets from every rank, if it is the
                same for all and each token has one choice; None: the ranks exchange their numbers
                (collective).

        Returns:
            [2, P] copies sent to and copies received from each rank; on the host, a list of each of
            these two, and the number of choices that arrive for this rank's experts.
        """
        num_parts = self.group.num_ranks
        if rows_per_expert is not None:  # tokens have one choice each
            sizes = [rows_per_expert * self.num_local] * num_parts
            return torch.full_like(copies_P, sizes[0]).expand(2, -1), sizes, sizes, sum(sizes)
        sent_P2 = torch.stack((copies_P, choices_P), dim=1)
        theirs_P2 = self.group.exchange_counts(sent_P2.flatten()).view(num_parts, 2)
        counts_2P = torch.stack((copies_P, theirs_P2[:, 0]))
        choices = theirs_P2[:, 1].sum(0, keepdim=True)
        *sizes, num_choices = torch.cat((counts_2P.flatten(), choices)).tolist()
        return counts_2P, sizes[:num_parts], sizes[num_parts:], num_choices

    def _routing(self, meta_RC: Tensor, line_R: Tensor, num_lines: int) -> tuple[Tensor, Tensor]:
        """Return expert ids and routing weights [B, K] of the B lines of the receive buffer.

        A line that holds metadata instead of a token, and a choice of another rank's expert, have
        the id L, the number of this rank's experts, which stands for no expert.

        Args:
            meta_RC: routing weights, then expert ids, of the R copies received.
            line_R: line of the buffer that holds each copy.
            num_lines: number of lines B.
        """
        top_k = meta_RC.shape[1] // 2
        num_local = self.num_local
        ids_RK = meta_RC[:, top_k:].to(torch.int64) - self.group.rank * num_local
        ids_RK = ids_RK.masked_fill((ids_RK < 0) | (ids_RK >= num_local), num_local)
        ids_BK = ids_RK.new_full((num_lines, top_k), num_local).index_copy_(0, line_R, ids_RK)
        probs_BK = meta_RC.new_zeros(num_lines, top_k).index_copy(0, line_R, meta_RC[:, :top_k])
        return ids_BK, probs_BK
