"""Whole rows from ranks that hold parts of them, by all-gather or by all-to-all (Ulysses).

Each of P ranks holds two of a row's 2 P chunks, one from its head and the mirror chunk from its
tail (``head_tail_index``). Letters: B rows, S positions of this rank, R =
P S positions of the whole row, N heads, n = N / P heads of this rank, D any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from automoe.comm.communicators import Communicator
from automoe.comm.tokens import Tokens


def head_tail_index(seq_len: int, cp: int, rank: int) -> Tensor:
    """Return the positions [R / cp] of a sequence of R = ``seq_len`` that cp rank ``rank`` holds.

    The sequence is cut into 2 cp chunks, and a rank holds one chunk from the head and its mirror
    from the tail: under causal attention every rank then has the same number of (query, key) pairs.
    """
    chunk = seq_len // (2 * cp)
    head = torch.arange(rank * chunk, (rank + 1) * chunk)
    tail = torch.arange((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk)
    return torch.cat((head, tail))


def gather_row(x_BS: Tensor, ranks: Communicator) -> Tensor:
    """Return whole sequences [B, R, ...], in order, of which each of ``ranks`` holds x [B, S, ...]."""
    if ranks.num_ranks == 1:
        return x_BS
    return _in_row_order(ranks.all_gather(x_BS).split(x_BS.shape[1], dim=1))


def _in_row_order(parts: Sequence[Tensor]) -> Tensor:
    """Join ``parts``, the positions [B, S, ...] of each cp rank, to sequences [B, R, ...].

    Each rank holds a chunk from the head of the sequence and its mirror from the tail, so the
    result is the ranks' first halves in order, then their second halves in reverse.
    """
    chunks = [chunk for part in parts for chunk in part.chunk(2, dim=1)]
    return torch.cat(chunks[::2] + chunks[::-2], dim=1)


def whole_rows(tokens: Tokens, ranks: Communicator) -> Tokens:
    """Return a copy of ``tokens`` with ``index`` and ``doc_ids`` [B, R] of whole sequences, for masks.

    ``ranks`` share the R positions. All other tensors keep this rank's S positions. Collective over
    ``ranks``.
    """
    num_rows, size = tokens.index.shape
    index_R = torch.arange(size * ranks.num_ranks, device=tokens.index.device)
    docs_BS = tokens.doc_ids
    docs_BR = None if docs_BS is None else gather_row(docs_BS, ranks)
    return replace(tokens, index=index_R.expand(num_rows, -1), doc_ids=docs_BR)


def exchange_heads(ranks: Communicator, *given_BSND: Tensor) -> tuple[Tensor, ...]:
    """Exchange heads for positions (Ulysses, arXiv 2309.14509): [B, S, N, D] to [B, R, n, D].

    The result has all R positions, in the order of the sequence, of n of the N heads. One
    all-to-all sends all tensors, which may differ in N. Rank p gets heads p n to (p + 1) n - 1 of
    each tensor. A tensor with fewer heads than ranks has each head repeated for the ranks that
    share it.
    """
    num_ranks = ranks.num_ranks
    if num_ranks == 1:
        return given_BSND
    split = [
        x.repeat_interleave(max(num_ranks // x.shape[2], 1), dim=2).chunk(num_ranks, dim=2)
        for x in given_BSND
    ]
    sent_PBSnD = torch.stack([torch.cat(parts, dim=2) for parts in zip(*split, strict=True)])
    row_BRnD = _in_row_order(ranks.all_to_all(sent_PBSnD).unbind())
    return row_BRnD.split([parts[0].shape[2] for parts in split], dim=2)


def exchange_positions(ranks: Communicator, row_BRnD: Tensor) -> Tensor:
    """Exchange positions for heads' outputs: [B, R, n, D] of whole sequences to [B, S, N, D].

    It undoes ``exchange_heads``: this rank's n of N heads become its S of R positions.
    """
    num_ranks = ranks.num_ranks
    if num_ranks == 1:
        return row_BRnD
    chunks = row_BRnD.chunk(2 * num_ranks, dim=1)
    parts = [torch.cat((chunks[p], chunks[-1 - p]), dim=1) for p in range(num_ranks)]
    return torch.cat(ranks.all_to_all(torch.stack(parts)).unbind(), dim=2)


def own_heads(ranks: Communicator, x_N: Tensor) -> Tensor:
    """Return the entries [n] of x [N] for the n heads that this rank has after an exchange of heads.

    Rank p of the P ``ranks`` has heads p n to (p + 1) n - 1, with n = N / P.
    """
    return x_N if ranks.num_ranks == 1 else x_N.chunk(ranks.num_ranks)[ranks.rank]
