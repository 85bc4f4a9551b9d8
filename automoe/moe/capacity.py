"""Capacity: how many tokens an expert takes, and which choices are dropped when more come.

An expert takes at most C = ceil(factor * T * K / E) choices. What T counts is the scope:

    rank      T is the tokens of this rank's micro-batch. Nothing travels; which choices are dropped depends
              on how the mesh and the micro-batches cut the batch.
    sequence  T is one row, whole, wherever its parts are. Choices are summed over the ranks that hold the
              row; what is dropped depends on nothing but the row.

Dropping happens after weights are computed, which are not renormalised: a token that loses a choice loses
that expert's term, and one that loses all passes through the residual (and the shared experts). Padding
takes no capacity. Shapes: B rows, S positions of this rank (R of the whole row), K top-k, E experts, G groups
that share capacities, N choices of a group.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import torch

from automoe.config.schema import MoEConfig
from automoe.moe.communicators import Communicators
from automoe.moe.dispatch.base import Dispatcher, Experts, sum_to_tokens
from automoe.moe.tokens import Tokens

# Weights closer than this count as equal, and the first choice in the row is served first. Tokens that are
# alike have weights equal up to rounding, and rounding differs from mesh to mesh.
PRIORITY_STEP = 2.0**-16


def expert_capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """ceil(factor * T * K / E), and at most T, since a token chooses an expert once.

    The factor counts as the decimal number that was written: 1.1 * 100 * 1 / 10 is 11, not 12.
    """
    return min(ceil(Fraction(repr(factor)) * num_tokens * top_k / num_experts), num_tokens)


def rank_within_expert(ids: torch.Tensor, num_experts: int, priority: torch.Tensor | None) -> torch.Tensor:
    """Place of each choice in the queue of its expert, first come first.

    Args:
        ids: [G, N] int64; an id of ``num_experts`` is a choice of no expert.
        priority: [G, N], the largest is served first; None, and equal ones, in the order of N.

    Returns:
        [G, N] int64, 0 for the first.
    """
    if priority is None:
        order = ids.argsort(dim=1, stable=True)
    else:
        by_priority = priority.argsort(dim=1, descending=True, stable=True)
        order = by_priority.gather(1, ids.gather(1, by_priority).argsort(dim=1, stable=True))
    counts = ids.new_zeros(ids.shape[0], num_experts + 1).scatter_add_(1, ids, torch.ones_like(ids))
    starts = counts.cumsum(1) - counts
    place = torch.arange(ids.shape[1], device=ids.device) - starts.gather(1, ids.gather(1, order))
    return torch.empty_like(ids).scatter_(1, order, place)


def rows_per_expert(moe: MoEConfig, tokens: Tokens, comms: Communicators, top_k: int, num_experts: int) -> int:
    """The most choices that one expert can keep from this rank's micro-batch."""
    num_rows, size = tokens.index.shape
    if moe.drop_scope == "rank":
        return expert_capacity(moe.capacity_factor, num_rows * size, top_k, num_experts)
    whole = size * comms.ranks_per_row
    return num_rows * min(expert_capacity(moe.capacity_factor, whole, top_k, num_experts), size)


def whole_rows(x: torch.Tensor, index: torch.Tensor, comms: Communicators) -> torch.Tensor:
    """x [B, S, ...] at ``index`` [B, S] of its rows -> [B, R, ...], the whole rows in order; not differentiable.

    Parts are written into zeros and summed, which is exact and needs no order among the ranks.
    """
    if comms.ranks_per_row == 1:
        return x  # a rank with whole rows holds them in order
    num_rows, size = index.shape
    full = x.new_zeros(num_rows, size * comms.ranks_per_row, *x.shape[2:])
    rows = torch.arange(num_rows, device=x.device).unsqueeze(1)
    full[rows, index] = x.detach()
    return comms.sum_over_row(full)


@torch.no_grad()
def choose_kept(
    ids: torch.Tensor,
    weights: torch.Tensor,
    tokens: Tokens,
    comms: Communicators,
    moe: MoEConfig,
    num_experts: int,
) -> torch.Tensor:
    """Which of the choices ``ids`` with ``weights``, both [B, S, K], fit: [B, S, K] bool. No host sync."""
    num_rows, size, top_k = ids.shape
    open_ids = ids.masked_fill(~tokens.valid.unsqueeze(-1), num_experts)
    by_probs = moe.drop_policy == "probs"
    if moe.drop_scope == "rank":
        groups = open_ids.view(1, -1)
        priority = (weights / PRIORITY_STEP).round().view(1, -1) if by_probs else None
        capacity = expert_capacity(moe.capacity_factor, num_rows * size, top_k, num_experts)
        fits = rank_within_expert(groups, num_experts, priority) < capacity
        return fits.view_as(ids) & (open_ids < num_experts)
    # One exchange: float64 holds ids exactly.
    both = torch.stack((open_ids.to(torch.float64), weights.to(torch.float64)), dim=-1)
    all_ids, all_weights = whole_rows(both, tokens.index, comms).unbind(-1)
    groups = all_ids.to(torch.int64).flatten(1)
    priority = (all_weights / PRIORITY_STEP).round().flatten(1) if by_probs else None
    capacity = expert_capacity(moe.capacity_factor, all_ids.shape[1], top_k, num_experts)
    fits = (rank_within_expert(groups, num_experts, priority) < capacity).view_as(all_ids)
    mine = fits if comms.ranks_per_row == 1 else fits.gather(1, tokens.index.unsqueeze(-1).expand_as(ids))
    return mine & (open_ids < num_experts)


def dispatch_padded(
    dispatcher: Dispatcher,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    kept: torch.Tensor,
    experts: Experts,
    num_experts: int,
    capacity: int,
) -> torch.Tensor:
    """What ``dispatcher`` returns for the kept choices, with exactly ``capacity`` rows for every expert.

    Each slot of each expert is handed to the dispatcher as a token with one choice. A slot that no choice
    fills reads token 0 with weight zero, so it changes no sum and no gradient.

    Args:
        x: [T, H].
        ids, weights, kept: [T, K]; no expert is kept more than ``capacity`` times.
    """
    top_k = ids.shape[1]
    flat = ids.flatten().masked_fill(~kept.flatten(), num_experts)
    place = rank_within_expert(flat.view(1, -1), num_experts, None).view(-1)
    slot = torch.where(flat < num_experts, flat * capacity + place, num_experts * capacity)
    choice = torch.full((num_experts * capacity + 1,), -1, dtype=torch.int64, device=x.device)
    choice.scatter_(0, slot, torch.arange(len(flat), device=x.device))  # all dropped ones share the last slot
    choice = choice[:-1]
    filled, choice = choice >= 0, choice.clamp_min(0)
    token = choice // top_k

    slot_weights = torch.where(filled, weights.flatten()[choice], 0).unsqueeze(1)
    slot_ids = torch.arange(num_experts, device=x.device).repeat_interleave(
        capacity, output_size=num_experts * capacity
    )
    y = dispatcher(x.index_select(0, token), slot_ids.unsqueeze(1), slot_weights, experts, capacity)
    return sum_to_tokens(y, token, x.shape[0])
