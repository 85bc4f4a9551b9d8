"""Expert capacity: how many tokens an expert takes, and which choices are dropped if more come.

An expert takes at most P = ceil(factor * T * K / E) choices, its capacity, and at most T.
``moe.drop_scope`` says which T tokens these are:

    rank      The tokens of this rank's micro-batch. Nothing is sent. Which choices are dropped
              depends on how the mesh and the micro-batches split the batch. Choices queue by
              position, then by sequence, as in Megatron-Core: no sequence goes before another.
    sequence  One whole sequence, wherever its parts are. Choices are summed over the ranks that
              share it, and the dropped choices depend on it alone.

Routing weights are computed before choices are dropped, and are not renormalised. A token that
loses a choice loses that expert's term; a token that loses all of them keeps the residual (and the
shared experts). Padding takes no capacity. Letters of dimensions: ``automoe.model``; here G groups
of tokens that share capacities, N choices of a group, P slots of an expert, C = E P of all.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from automoe.comm.communicators import ProcessGroupCollection
from automoe.comm.tokens import Tokens
from automoe.config.schema import MoEConfig
from automoe.kernels.row_sums import gather_rows
from automoe.moe.dispatch.base import Dispatcher, RunExperts, sort_by_expert, sum_to_tokens

# Routing weights are rounded to multiples of this step before they are compared, and ties are
# served in the order of the queue. Equal tokens' may differ by rounding, which depends on the mesh.
PRIORITY_STEP = 2.0**-16


def expert_capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the most tokens that an expert keeps: ceil(factor * T * K / E), at most T.

    T is ``num_tokens``, K ``top_k``, E ``num_experts``. A token chooses an expert once, hence the
    limit T. The factor is taken as the decimal number that the user wrote: 1.1 * 100 * 1 / 10 is
    11, not 12.
    """
    return min(ceil(Fraction(repr(factor)) * num_tokens * top_k / num_experts), num_tokens)


def rank_within_expert(topk_ids_GN: Tensor, num_experts: int, priority_GN: Tensor | None) -> Tensor:
    """Return the position of each choice in the queue of its expert, 0 for the first: [G, N] int64.

    G groups of tokens have queues of their own; N are a group's choices.

    Args:
        topk_ids_GN: int64 expert ids; the id ``num_experts`` marks a choice of no expert.
        num_experts: number of experts E.
        priority_GN: the largest priority is served first, equal ones in the order of N. None serves
            all choices in the order of N.
    """
    ids = topk_ids_GN
    if priority_GN is None:
        order = ids.argsort(dim=1, stable=True)
    else:
        by_priority = priority_GN.argsort(dim=1, descending=True, stable=True)
        order = by_priority.gather(1, ids.gather(1, by_priority).argsort(dim=1, stable=True))
    counts = ids.new_zeros(ids.shape[0], num_experts + 1).scatter_add_(1, ids, torch.ones_like(ids))
    starts = counts.cumsum(1) - counts
    place = torch.arange(ids.shape[1], device=ids.device) - starts.gather(1, ids.gather(1, order))
    return torch.empty_like(ids).scatter_(1, order, place)


def slots_per_expert(
    moe: MoEConfig,
    tokens: Tokens,
    pg_collection: ProcessGroupCollection,
    top_k: int,
    num_experts: int,
) -> int:
    """Return the most choices of this rank's micro-batch that one expert can keep.

    With ``moe.drop_scope=rank`` this is the expert's capacity. With ``sequence`` it is the capacity
    for one whole sequence, but at most this rank's positions of it, times the number of sequences.

    Args:
        moe: capacity factor and drop scope.
        tokens: per-token tensors; only the shape [B, s] is read.
        pg_collection: groups of the ranks that share a sequence; only their sizes are read.
        top_k, num_experts: K and E of the layer.
    """
    num_sequences, size = tokens.index.shape
    if moe.drop_scope == "rank":
        return expert_capacity(moe.capacity_factor, num_sequences * size, top_k, num_experts)
    whole = size * pg_collection.ranks_per_sequence
    return num_sequences * min(
        expert_capacity(moe.capacity_factor, whole, top_k, num_experts), size
    )


def join_sequences(x: Tensor, index_Bs: Tensor, pg_collection: ProcessGroupCollection) -> Tensor:
    """Join the ranks' positions [B, s, ...] to whole sequences [B, R, ...], without gradient.

    Each rank writes its positions into zeros, and an all-reduce sums them. The sum is exact and
    independent of the order of ranks.

    Args:
        index_Bs: index in the sequence of each position of x.
        pg_collection: its tp and cp groups are the ranks that hold the other positions.
    """
    if pg_collection.ranks_per_sequence == 1:
        return x  # a rank with whole sequences holds them in order
    num_sequences, size = index_Bs.shape
    full = x.new_zeros(num_sequences, size * pg_collection.ranks_per_sequence, *x.shape[2:])
    sequences = torch.arange(num_sequences, device=x.device).unsqueeze(1)
    full[sequences, index_Bs] = x.detach()
    return pg_collection.sum_over_sequence(full)


@torch.no_grad()
def choose_kept(
    topk_ids_BsK: Tensor,
    probs_BsK: Tensor,
    tokens: Tokens,
    pg_collection: ProcessGroupCollection,
    moe: MoEConfig,
    num_experts: int,
    num_zero_experts: int = 0,
) -> Tensor:
    """Return the mask [B, s, K] of choices that fit into their expert's capacity. No host sync.

    A choice is one of the K experts of a token. If an expert has too many, it keeps those with the
    largest routing weights (``moe.drop_policy=probs``) or at the first positions. Choices of
    padding are not kept. With ``moe.drop_scope=sequence`` the call is collective over the ranks
    that share a sequence.

    Args:
        topk_ids_BsK: ids of the chosen experts, at this rank's s positions of B sequences.
        probs_BsK: routing weights of the choices.
        tokens: per-token tensors; the mask of padding and the positions are read.
        pg_collection: process groups, among them those of the ranks that share a sequence.
        num_experts, num_zero_experts: number of experts, and of the last ones among them, which
            compute nothing and so have no limit.
    """
    num_sequences, size, top_k = topk_ids_BsK.shape
    ids_BsK = topk_ids_BsK.masked_fill(~tokens.valid.unsqueeze(-1), num_experts)
    of_rank = moe.drop_scope == "rank"
    if of_rank:
        # Choices queue by position, then by sequence.
        ids_GN, probs_GN = (x.transpose(0, 1).reshape(1, -1) for x in (ids_BsK, probs_BsK))
        num_tokens = num_sequences * size
    else:
        # One collective carries ids and weights: float64 holds ids exactly.
        both = torch.stack((ids_BsK.to(torch.float64), probs_BsK.to(torch.float64)), dim=-1)
        joined = join_sequences(both, tokens.index, pg_collection)
        ids_GN, probs_GN = joined.flatten(1, 2).unbind(-1)
        ids_GN = ids_GN.to(torch.int64)
        num_tokens = size * pg_collection.ranks_per_sequence
    priority_GN = (probs_GN / PRIORITY_STEP).round() if moe.drop_policy == "probs" else None
    capacity = expert_capacity(moe.capacity_factor, num_tokens, top_k, num_experts)
    fits_GN = rank_within_expert(ids_GN, num_experts, priority_GN) < capacity
    if of_rank:
        fits_BsK = fits_GN.view(size, num_sequences, top_k).transpose(0, 1)
    else:
        fits_BsK = fits_GN.view(num_sequences, num_tokens, top_k)
        if num_tokens > size:  # only the positions of this rank
            fits_BsK = fits_BsK.gather(1, tokens.index.unsqueeze(-1).expand_as(ids_BsK))
    fits_BsK |= ids_BsK >= num_experts - num_zero_experts
    return fits_BsK & (ids_BsK < num_experts)


def dispatch_padded(
    dispatcher: Dispatcher,
    num_experts: int,
    capacity: int,
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    probs_TK: Tensor,
    experts: RunExperts,
) -> Tensor:
    """Run ``dispatcher`` with exactly ``capacity`` tokens per expert; return its result [T, H].

    No expert may have more than ``capacity`` choices; the id ``num_experts`` marks a dropped
    choice. Each slot of an expert (one of its ``capacity`` places) goes to the dispatcher as a
    token with one choice. A slot without a choice reads token 0 with weight zero, so it changes no
    sum and no gradient.

    Args:
        num_experts: number of experts of all ranks.
        x_TH: this rank's tokens, with K chosen experts ``topk_ids_TK`` and routing weights
            ``probs_TK``.
        experts: function that runs this rank's experts on rows sorted by expert.
    """
    order_M, counts_E = sort_by_expert(topk_ids_TK, num_experts)
    slot_P = torch.arange(capacity, device=x_TH.device)
    filled_C = (slot_P < counts_E.unsqueeze(1)).flatten()
    place_C = ((counts_E.cumsum(0) - counts_E).unsqueeze(1) + slot_P).flatten()
    choice_C = torch.where(filled_C, order_M[place_C.clamp_max(len(order_M) - 1)], 0)
    token_C = choice_C // topk_ids_TK.shape[1]

    probs_C1 = torch.where(filled_C, probs_TK.flatten()[choice_C], 0).unsqueeze(1)
    ids_C = torch.arange(num_experts, device=x_TH.device).repeat_interleave(
        capacity, output_size=len(token_C)
    )
    y_CH = dispatcher(gather_rows(x_TH, token_C), ids_C.unsqueeze(1), probs_C1, experts, capacity)
    return sum_to_tokens(y_CH, token_C, x_TH.shape[0])
