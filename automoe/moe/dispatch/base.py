"""Dispatchers send each token to the ranks of its experts and bring the results back: what all are
made of, and the one for one rank.

Every dispatcher is an object with one signature:

    x_TH            this rank's tokens
    topk_ids_TK     int64, chosen experts, numbered over all E of the layer; E: a dropped choice
    weights_TK      routing weights
    experts         ``f(x, gather_idx, offsets, probs) -> rows`` over this rank's experts
    rows_per_expert how many choices every expert gets from every rank, if known (padding to capacity): then
                    sizes need no host sync. Default None
    returns [T, H]  sum over k of weights * expert(x)

It is given the group that it sends over (``DispatchGroup``) and knows nothing else of the mesh. One
object serves every layer and micro-batch, so it keeps nothing from one call to the next. Weights do
not depend on the dispatcher, so any of them runs on any checkpoint.

Shapes: T tokens of this rank, K top-k, H hidden, E experts, P ranks, M rows of (token, choice)
    pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Dispatcher = Callable[..., torch.Tensor]  # its arguments are told above


class DispatchGroup(Protocol):
    """The ranks of one mesh axis, of which this one is number ``rank``. What is sent is cut on dim
    0.

    Exchanges of rows are differentiable, and may return before their data is there: ``wait`` for it
    where something other than torch reads it.
    """

    rank: int
    num_ranks: int

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] of equal size on all ranks -> [P T, ...]; the gradient is reduce-scattered."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[P T, ...], this rank's term of a sum over ranks -> [T, ...]; the gradient is
        all-gathered."""

    def all_to_all(
        self, x: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> torch.Tensor:
        """Sends ``input_splits[r]`` rows to rank r and receives ``output_splits[r]``; the gradient
        goes back."""

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """[P n] int64, n counts for each rank -> [P n], n from each rank."""

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with its data there."""


def sort_by_expert(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order that sorts choices by expert, and how many each expert got.

    Args:
        topk_ids: any shape, M choices in all; an id of ``num_experts`` or more is sorted last and
            not counted.

    Returns:
        order [M] int64 (stable, so tokens of one expert keep their order), counts [num_experts]
        int64.
    """
    return topk_ids.flatten().argsort(stable=True), count_choices(topk_ids, num_experts)


def count_choices(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[num_experts] int64: how many of these ids, of any shape, are each expert's."""
    ids_M = topk_ids.flatten()
    # Not torch.bincount: on CUDA it brings the largest id to the host.
    bins_M = ids_M.clamp(max=num_experts)
    return ids_M.new_zeros(num_experts + 1).scatter_add_(0, bins_M, torch.ones_like(ids_M))[
        :num_experts
    ]


def group_ends(counts_E: torch.Tensor) -> torch.Tensor:
    """[E] counts -> [E] int32 end of each group, as grouped matrix products take it."""
    return counts_E.cumsum(0).to(torch.int32)


def regroup_by_expert(counts_PE: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order that brings rows sorted by (rank, expert) to (expert, rank), as experts take them, and
    its inverse.

    Args:
        counts_PE: [P, E] int64, rows from each of P ranks for each of this rank's E experts.
        num_rows: their sum; given, so that nothing waits for it on the host.

    Returns:
        Two [num_rows] int64: the row to read at each new place, and the way back.
    """
    num_ranks, num_experts = counts_PE.shape
    expert_of_row = torch.arange(num_experts, device=counts_PE.device).repeat(num_ranks)
    expert_of_row = expert_of_row.repeat_interleave(counts_PE.flatten(), output_size=num_rows)
    by_expert = expert_of_row.argsort(stable=True)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(num_rows, device=counts_PE.device)
    return by_expert, back


class _SumToTokens(torch.autograd.Function):
    """``index_add`` that keeps only the index for its backward; torch's own also keeps the rows."""

    @staticmethod
    def forward(
        ctx, rows_MH: torch.Tensor, token_idx_M: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(token_idx_M)
        return rows_MH.new_zeros(num_tokens, rows_MH.shape[-1]).index_add_(0, token_idx_M, rows_MH)

    @staticmethod
    def backward(ctx, grad_TH: torch.Tensor):
        (token_idx_M,) = ctx.saved_tensors
        return grad_TH.index_select(0, token_idx_M), None, None


def sum_to_tokens(
    rows_MH: torch.Tensor, token_idx_M: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """[M, H] rows, each of token ``token_idx`` [M] -> [num_tokens, H] sums."""
    return _SumToTokens.apply(rows_MH, token_idx_M, num_tokens)


def run_choices(
    x_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: Experts,
    num_experts: int,
    num_rows: int | None = None,
) -> torch.Tensor:
    """[T, H]: for each of these tokens the weighted sum of the experts that it chose among the
    ``num_experts`` here.

    Args:
        topk_ids_TK: an id of ``num_experts`` or more is a choice of none of them.
        num_rows: choices of these experts in all; None: they are counted, and the host waits for
            it.
    """
    order_M, counts_E = sort_by_expert(topk_ids_TK, num_experts)
    if num_rows is None:
        num_rows = int(counts_E.sum())
    order_M = order_M[:num_rows]
    token_idx_M = order_M // topk_ids_TK.shape[1]
    probs_M = weights_TK.flatten()[order_M]
    rows_MH = experts(x_TH, token_idx_M, group_ends(counts_E), probs_M)
    return sum_to_tokens(rows_MH, token_idx_M, x_TH.shape[0])


class LocalDispatcher:
    """All experts are on this rank: the expert function reads the tokens themselves, without a
    copy.

    Args:
        drops: choices may be of no expert (id ``num_experts``). Leaving them out costs one host
            sync a call.
    """

    def __init__(self, num_experts: int, drops: bool = False) -> None:
        self.num_experts, self.drops = num_experts, drops

    def __call__(
        self, x_TH, topk_ids_TK, weights_TK, experts: Experts, rows_per_expert=None
    ) -> torch.Tensor:
        num_rows = None if self.drops else topk_ids_TK.numel()
        return run_choices(x_TH, topk_ids_TK, weights_TK, experts, self.num_experts, num_rows)
