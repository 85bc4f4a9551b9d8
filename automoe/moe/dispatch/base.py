"""Dispatchers send each token to the ranks of its experts and bring the results back.

This file holds the parts that all dispatchers share, and the dispatcher for one rank. A dispatcher
receives the group that it sends over (``DispatchGroup``) and knows nothing else of the
mesh. One object serves every layer and micro-batch, so it keeps nothing from one call to the next.
Parameters do not depend on the dispatcher, so any of them runs on any checkpoint.

Shapes: T tokens of this rank, K top-k, H hidden, E experts, P ranks, M rows of (token, choice)
pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from automoe.comm.collectives import DispatchGroup as DispatchGroup
from automoe.config.schema import MoEConfig
from automoe.kernels.row_sums import sum_rows
from automoe.moe.dispatch.wire import rounded_to_8_bits

# this rank's experts: the first four arguments and the result of an ``ExpertBackend``
RunExperts = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Dispatcher(Protocol):
    """Function that returns each token's sum over its K choices of probs * expert(x): [T, H].

    Args:
        x_TH: this rank's tokens.
        topk_ids_TK: int64, chosen experts of all E of the layer; E or more: of no expert.
        probs_TK: routing weights.
        experts: function (x_TH, gather_idx_R, offsets_E, probs_R) -> [R, H] that runs this rank's
            experts on R rows sorted by expert (``GroupedExperts.forward``).
        rows_per_expert: number of choices that every expert gets from every rank, if known (padding
            to capacity): sizes then need no host sync.
    """

    def __call__(
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None, /
    ) -> Tensor: ...


def sort_by_expert(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort choices by expert and count the choices of each expert.

    Args:
        topk_ids: expert ids of any shape, M choices in all; ids of ``num_experts`` or more are
            sorted last and not counted.
        num_experts: number of experts to count.

    Returns:
        order [M] int64 (stable, so tokens of one expert keep their order), counts [num_experts]
        int64.
    """
    return topk_ids.flatten().argsort(stable=True), count_choices(topk_ids, num_experts)


def count_choices(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert occurs in ids of any shape: [num_experts] int64."""
    ids_M = topk_ids.flatten()
    # torch.bincount would sync with the host on CUDA to read the largest id.
    bins_M = ids_M.clamp(max=num_experts)
    return ids_M.new_zeros(num_experts + 1).scatter_add_(0, bins_M, torch.ones_like(ids_M))[
        :num_experts
    ]


def group_ends(counts_E: Tensor) -> Tensor:
    """Return the cumulative sums of counts [E] as int32, the group ends that grouped products take."""
    return counts_E.cumsum(0).to(torch.int32)


def regroup_by_expert(counts_PE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the order that takes rows sorted by (rank, expert) to (expert, rank), and its inverse.

    Rows are (token, expert) pairs that other ranks sent.

    Args:
        counts_PE: [P, E] int64, rows from each of P ranks for each of this rank's E experts.
        num_rows: sum of the counts, passed in so that the host need not wait for the sum.

    Returns:
        Two [num_rows] int64: the row to read at each new position, and the inverse order.
    """
    num_ranks, num_experts = counts_PE.shape
    expert_of_row = torch.arange(num_experts, device=counts_PE.device).repeat(num_ranks)
    expert_of_row = expert_of_row.repeat_interleave(counts_PE.flatten(), output_size=num_rows)
    by_expert = expert_of_row.argsort(stable=True)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(num_rows, device=counts_PE.device)
    return by_expert, back


class _SumToTokens(torch.autograd.Function):
    """Autograd function that sums rows [M, H] into their tokens [T, H]; it saves only the index [M].

    A row with the index T, which is no token's, is left out of the sum; its gradient is arbitrary.
    """

    @staticmethod
    def forward(ctx, rows_MH, token_idx_M, num_tokens: int):
        ctx.save_for_backward(token_idx_M)
        return sum_rows(rows_MH, token_idx_M, num_tokens)

    @staticmethod
    def backward(ctx, grad_TH):
        (token_idx_M,) = ctx.saved_tensors
        # An index beyond the tokens is clamped to one that can be read.
        return grad_TH.index_select(0, token_idx_M.clamp(max=grad_TH.shape[0] - 1)), None, None


def sum_to_tokens(rows_MH: Tensor, token_idx_M: Tensor, num_tokens: int) -> Tensor:
    """Sum expert outputs [M, H] by the tokens they belong to: [num_tokens, H], differentiable.

    Args:
        token_idx_M: token of each row; ``num_tokens`` marks a row without a token.
    """
    return _SumToTokens.apply(rows_MH, token_idx_M, num_tokens)


def run_choices(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    probs_TK: Tensor,
    experts: RunExperts,
    num_experts: int,
    num_rows: int | None = None,
) -> Tensor:
    """Return each token's weighted sum over its chosen experts that this rank holds: [T, H].

    Args:
        topk_ids_TK: expert ids; an id of ``num_experts`` or more is a choice of no expert here.
        experts: function that runs this rank's experts on rows sorted by expert, with the arguments
            of ``GroupedExperts.forward``.
        num_experts: number of experts of this rank.
        num_rows: number of all choices of this rank's experts; None: choices are counted, which
            makes the host wait.
    """
    order_M, counts_E = sort_by_expert(topk_ids_TK, num_experts)
    if num_rows is None:
        num_rows = int(counts_E.sum())
    order_M = order_M[:num_rows]
    token_idx_M = order_M // topk_ids_TK.shape[1]
    probs_M = probs_TK.flatten()[order_M]
    rows_MH = experts(x_TH, token_idx_M, group_ends(counts_E), probs_M)
    return sum_to_tokens(rows_MH, token_idx_M, x_TH.shape[0])


@dataclass
class LocalDispatcher:
    """Dispatcher for a rank with all experts: they read the tokens themselves, without a copy.

    If ``moe`` drops choices without padding, or there are zero experts, choices may be of no expert
    (id ``num_experts`` or more), and leaving them out costs one host sync per call. With
    ``moe.dispatch_dtype=fp8`` tokens are rounded to 8 bits, as if they were sent to other ranks, so
    that results do not depend on the mesh.

    Attributes:
        num_experts: number of experts of the layer.
        moe: the ``moe`` section of the configuration.
        zero_experts: True if the layer has zero experts, which are not dispatched.
    """

    num_experts: int
    moe: MoEConfig = field(default_factory=MoEConfig)
    zero_experts: bool = False

    def __call__(
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None
    ) -> Tensor:
        fewer = (self.moe.capacity_factor > 0 or self.zero_experts) and not self.moe.pad_to_capacity
        num_rows = None if fewer else topk_ids_TK.numel()
        if self.moe.dispatch_dtype == "fp8":
            x_TH = rounded_to_8_bits(x_TH)
        return run_choices(x_TH, topk_ids_TK, probs_TK, experts, self.num_experts, num_rows)
