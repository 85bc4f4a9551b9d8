"""The dispatcher's signature, the index arithmetic all of them share, and the one that needs no ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from automoe.moe.dispatch.measure import on_host, stage

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Dispatcher(Protocol):
    """See the package's docstring for shapes."""

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Experts,
        rows_per_expert: int | None = None,
    ) -> torch.Tensor: ...


def sort_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order that sorts choices by expert, and how many each expert got.

    Args:
        ids: any shape, M choices in all; an id of ``num_experts`` or more sorts behind and is not counted.

    Returns:
        order [M] int64 (stable, so tokens of one expert keep their order), counts [num_experts] int64.
    """
    flat = ids.flatten()
    # Not torch.bincount: on CUDA it brings the largest id to the host.
    bins = flat.clamp(max=num_experts)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, bins, torch.ones_like(flat))[:num_experts]
    return flat.argsort(stable=True), counts


def group_ends(counts: torch.Tensor) -> torch.Tensor:
    """[E] counts -> [E] int32 end of each group, as grouped matrix products want it."""
    return counts.cumsum(0).to(torch.int32)


def regroup_by_expert(table: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order that brings rows which lie by (rank, expert) to (expert, rank), as experts want them, and its inverse.

    Args:
        table: [P, E] int64, rows from each of P ranks for each of this rank's E experts.
        num_rows: their sum, known to the caller, so that nothing waits for it on the host.

    Returns:
        Two [num_rows] int64: the row to read at each new place, and the way back.
    """
    num_ranks, num_experts = table.shape
    expert_of_row = torch.arange(num_experts, device=table.device).repeat(num_ranks)
    expert_of_row = expert_of_row.repeat_interleave(table.flatten(), output_size=num_rows)
    by_expert = expert_of_row.argsort(stable=True)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(num_rows, device=table.device)
    return by_expert, back


class _SumToTokens(torch.autograd.Function):
    """``index_add`` that keeps the index alone; torch's own keeps the rows too, which nothing needs."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, token_idx: torch.Tensor, num_tokens: int) -> torch.Tensor:
        ctx.save_for_backward(token_idx)
        return rows.new_zeros(num_tokens, rows.shape[-1]).index_add_(0, token_idx, rows)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (token_idx,) = ctx.saved_tensors
        return grad.index_select(0, token_idx), None, None


def sum_to_tokens(rows: torch.Tensor, token_idx: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[R, H] rows, each of token ``token_idx`` [R] -> [num_tokens, H] sums."""
    return _SumToTokens.apply(rows, token_idx, num_tokens)


class LocalDispatcher:
    """All experts are on this rank: the expert function reads the tokens themselves, no copy is made.

    Args:
        drops: choices may be of no expert (id ``num_experts``). Leaving them out costs one host sync a call.
    """

    def __init__(self, num_experts: int, drops: bool = False) -> None:
        self.num_experts, self.drops = num_experts, drops

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
            if self.drops:
                order = order[: on_host(counts.sum())]
            token_idx = order // ids.shape[1]
            probs = weights.flatten()[order]
        rows = experts(x, token_idx, group_ends(counts), probs)
        with stage("unpermute"):
            return sum_to_tokens(rows, token_idx, x.shape[0])
