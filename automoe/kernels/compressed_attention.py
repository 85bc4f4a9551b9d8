"""Compressed attention of DeepSeek-V4 (its report, section 2.3), to entries that stand for windows.

A window is W successive positions of a document, counted from the document's start; its entry is a
learned average of them. A query attends to the last positions of its document and to entries of
windows that are complete at its own position.

Letters: B rows, S positions, E entries, W positions of a window, D head dim, N query heads, c
queries of a chunk, K keys that a chunk reads, r = c N rows of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 256  # queries whose scores are in memory at once


class Windows(NamedTuple):
    """The complete windows of W positions in each of B rows of S positions, in E = S // W entries.

    An entry stands for a window. Entries without a window are seen by no query.

    Attributes:
        places_BEW: int64, indices in the row of the W positions of each entry's window.
        first_BE: int64, index in the document of the window's first position; 0: the document's
            first window.
        seen_BSE: True where a query sees an entry: the window is of its document and complete.
    """

    places_BEW: Tensor
    first_BE: Tensor
    seen_BSE: Tensor


def windows_of(positions_BS: Tensor, doc_ids_BS: Tensor | None, width: int) -> Windows:
    """Return the windows of ``width`` positions of each row.

    A document's last positions, fewer than ``width``, are in no window.

    Args:
        positions_BS: index of each token in its document, from 0.
        doc_ids_BS: document of each token: a query sees the windows of its document that have ended.
            None: those of its whole row.
    """
    size = positions_BS.shape[1]
    count = size // width
    place_S = torch.arange(size, device=positions_BS.device)
    ends_BS = (positions_BS + 1) % width == 0
    # The n-th end of a window goes to column n, all other positions to a last column, which is
    # dropped. A row with fewer windows keeps S, a position that no query reaches.
    column_BS = torch.where(ends_BS, ends_BS.cumsum(1) - 1, count).clamp(max=count)
    end_BE = positions_BS.new_full((len(positions_BS), count + 1), size)
    end_BE = end_BE.scatter(1, column_BS, place_S.expand_as(positions_BS))[:, :count]
    seen_BSE = end_BE.unsqueeze(1) <= place_S.unsqueeze(-1)
    steps_W = torch.arange(1 - width, 1, device=positions_BS.device)
    places_BEW = (end_BE.unsqueeze(-1) + steps_W).clamp(0, max(size - 1, 0))
    if doc_ids_BS is not None:
        docs_BE = doc_ids_BS.gather(1, places_BEW[..., -1])
        seen_BSE = seen_BSE & (docs_BE.unsqueeze(1) == doc_ids_BS.unsqueeze(-1))
    return Windows(places_BEW, positions_BS.gather(1, places_BEW[..., 0]), seen_BSE)


def pool_windows(
    kv: Tensor, gate: Tensor, bias: Tensor, windows: Windows, overlaps: bool
) -> Tensor:
    """Return one entry [D] for each of E windows: averages of ``kv``, weighted by a softmax of ``gate``.

    Each dim has weights of its own, softmax(gate + bias) over the window's W positions, in at least
    float32. If windows overlap, the average is over 2 W positions: the previous window of the
    document, if any, with the first D numbers of ``kv``, ``gate`` and ``bias``, and the window
    itself with the last D.

    Args:
        kv, gate: [B, S, D], or [B, S, 2 D] if windows overlap.
        bias: [W, D] or [W, 2 D], of a window's positions.
        windows: the positions of each window.
        overlaps: True if windows overlap.

    Returns:
        [B, E, D].
    """
    wide = torch.promote_types(kv.dtype, torch.float32)
    here_BEW = windows.places_BEW
    rows_B11 = torch.arange(len(kv), device=kv.device)[:, None, None] * kv.shape[1]

    def cut(x: Tensor, places_BEW: Tensor) -> Tensor:
        # index_select keeps only the index for its backward pass; gather would keep x too
        cut_TD = x.flatten(0, 1).index_select(0, (places_BEW + rows_B11).flatten())
        return cut_TD.unflatten(0, places_BEW.shape)

    if not overlaps:
        values, gates = cut(kv, here_BEW), cut(gate, here_BEW).to(wide) + bias
    else:
        before_BEW = (here_BEW - here_BEW.shape[-1]).clamp(min=0)
        first_BE11 = windows.first_BE.eq(0)[..., None, None]
        (kv_a, kv_b), (gate_a, gate_b), (bias_a, bias_b) = (
            x.chunk(2, dim=-1) for x in (kv, gate, bias)
        )
        values = torch.cat((cut(kv_a, before_BEW), cut(kv_b, here_BEW)), dim=2)
        gates_a = cut(gate_a, before_BEW).to(wide) + bias_a
        gates_b = cut(gate_b, here_BEW).to(wide) + bias_b
        gates = torch.cat((gates_a.masked_fill(first_BE11, -torch.inf), gates_b), dim=2)
    return (values * gates.softmax(2)).sum(2).to(kv.dtype)


def attend_entries(
    q_BSND: Tensor,
    kv_BSD: Tensor,
    entries_BED: Tensor,
    seen_BSE: Tensor | None,
    sinks_N: Tensor | None,
    doc_ids_BS: Tensor | None,
    window: int,
    scale: float,
) -> Tensor:
    """Return the output [B, S, N, D] of softmax attention over a sliding window and over entries.

    An entry is a key pooled from a window of positions (``pool_windows``). One vector per position
    and per entry is key and value of all heads. Scores are computed a chunk of queries at a time,
    in at least float32, and again in the backward pass: the memory of scores and masks of positions
    does not grow with S; the mask of entries has S x E bytes.

    Args:
        q_BSND, kv_BSD, entries_BED: queries; keys (and values) of positions, and of entries.
        seen_BSE: True where a query sees an entry. Entries are sorted by the ends of their windows,
            which have one length. None: there are no entries (E = 0).
        sinks_N: per head a logit that takes probability and has no value; None: no sinks.
        doc_ids_BS: document of each position; None: a row is one document.
        window: positions that a query sees, its own included.
        scale: factor of the products of queries and keys.
    """
    return _Attention.apply(
        q_BSND, kv_BSD, entries_BED, sinks_N, seen_BSE, doc_ids_BS, window, scale
    )


class _Attention(torch.autograd.Function):
    """Autograd function of ``attend_entries``; it saves its inputs, the output and each query's logsumexp."""

    @staticmethod
    def forward(ctx, q_BSND, kv_BSD, entries_BED, sinks_N, *settings):
        ctx.settings = settings
        out_BSND = torch.empty_like(q_BSND)
        wide = torch.promote_types(q_BSND.dtype, torch.float32)
        lse_BSN = q_BSND.new_empty(q_BSND.shape[:3], dtype=wide)
        for chunk in _chunks(q_BSND.shape[1], entries_BED.shape[1], settings[2]):
            q_BcND = q_BSND[:, chunk.queries]
            keys_BKD = _keys(kv_BSD, entries_BED, chunk)
            scores_BcNK = _scores(q_BcND, keys_BKD, chunk, *settings)
            lse_BcN = scores_BcNK.logsumexp(-1)
            if sinks_N is not None:
                lse_BcN = lse_BcN.logaddexp(sinks_N.to(wide))
            lse_BSN[:, chunk.queries] = lse_BcN
            shares_BrK = scores_BcNK.sub_(lse_BcN.unsqueeze(-1)).exp_().flatten(1, 2)
            out_BrD = _product(shares_BrK.to(kv_BSD.dtype), keys_BKD)
            out_BSND[:, chunk.queries] = out_BrD.view(q_BcND.shape)
            del scores_BcNK, shares_BrK  # before those of the next chunk are made
        ctx.save_for_backward(q_BSND, kv_BSD, entries_BED, sinks_N, out_BSND, lse_BSN)
        return out_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BSND):
        q_BSND, kv_BSD, entries_BED, sinks_N, out_BSND, lse_BSN = ctx.saved_tensors
        wide = lse_BSN.dtype
        grad_q_BSND = torch.empty_like(q_BSND)
        sums = [
            None if x is None else torch.zeros_like(x, dtype=wide)
            for x in (kv_BSD, entries_BED, sinks_N)
        ]
        grad_kv_BSD, grad_entries_BED, grad_sinks_N = sums
        for chunk in _chunks(q_BSND.shape[1], entries_BED.shape[1], ctx.settings[2]):
            q_BcND, grad_BcND, out_BcND, lse_BcN = (
                x[:, chunk.queries] for x in (q_BSND, grad_BSND, out_BSND, lse_BSN)
            )
            # the gradient of a score is share * (gradient of the share - delta)
            delta_BcN = (grad_BcND.to(wide) * out_BcND).sum(-1)
            keys_BKD = _keys(kv_BSD, entries_BED, chunk)
            grad_q_BrD, grad_BKD = _chunk_gradients(
                q_BcND, keys_BKD, grad_BcND, lse_BcN, delta_BcN, chunk, ctx.settings
            )
            grad_q_BSND[:, chunk.queries] = grad_q_BrD.view(q_BcND.shape)
            near = chunk.near.stop - chunk.near.start
            grad_kv_BSD[:, chunk.near] += grad_BKD[:, :near]
            grad_entries_BED[:, chunk.far] += grad_BKD[:, near:]
            if sinks_N is not None:
                grad_sinks_N -= ((sinks_N.to(wide) - lse_BcN).exp() * delta_BcN).sum((0, 1))
        inputs = kv_BSD, entries_BED, sinks_N
        narrow = (None if x is None else x.to(y.dtype) for x, y in zip(sums, inputs, strict=True))
        return grad_q_BSND, *narrow, *(None,) * 4


class _Chunk(NamedTuple):
    """A chunk of a row's queries, and the ranges of keys that they may see.

    Attributes:
        queries: positions of the queries.
        near: positions within the sliding window of any of them.
        far: the first entries (keys pooled from windows of positions); later ones end after all of
            the queries.
    """

    queries: slice
    near: slice
    far: slice


def _chunks(size: int, count: int, window: int) -> Iterator[_Chunk]:
    for start in range(0, size, CHUNK):
        stop = min(start + CHUNK, size)
        far = -(-stop * count // size)  # later windows end behind the queries
        yield _Chunk(slice(start, stop), slice(max(start - window + 1, 0), stop), slice(0, far))


def _keys(kv_BSD: Tensor, entries_BED: Tensor, chunk: _Chunk) -> Tensor:
    return torch.cat((kv_BSD[:, chunk.near], entries_BED[:, chunk.far]), dim=1)


def _scores(
    q_BcND: Tensor,
    keys_BKD: Tensor,
    chunk: _Chunk,
    seen_BSE: Tensor | None,
    doc_ids_BS: Tensor | None,
    window: int,
    scale: float,
) -> Tensor:
    """Return a chunk's scores [B, c, N, K] in at least float32, -inf where a query does not see a key.

    Keys are the chunk's positions (``near``), then its entries (``far``, keys pooled from windows of
    positions). Other arguments are as in ``attend_entries``.
    """
    queries, near, far = chunk
    back_cK = torch.arange(queries.start, queries.stop, device=q_BcND.device).unsqueeze(1)
    back_cK = back_cK - torch.arange(near.start, near.stop, device=q_BcND.device)
    seen_BcK = ((back_cK >= 0) & (back_cK < window)).expand(len(q_BcND), -1, -1)
    if doc_ids_BS is not None:
        seen_BcK = seen_BcK & (doc_ids_BS[:, queries, None] == doc_ids_BS[:, None, near])
    if seen_BSE is not None:
        seen_BcK = torch.cat((seen_BcK, seen_BSE[:, queries, far]), dim=-1)
    scores_BrK = _product(q_BcND.flatten(1, 2), keys_BKD.mT).mul_(scale)
    return scores_BrK.view(*q_BcND.shape[:3], -1).masked_fill_(~seen_BcK.unsqueeze(2), -torch.inf)


def _chunk_gradients(
    q_BcND: Tensor,
    keys_BKD: Tensor,
    grad_BcND: Tensor,
    lse_BcN: Tensor,
    delta_BcN: Tensor,
    chunk: _Chunk,
    settings: tuple,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a chunk's c queries [B, c N, D] and keys [B, K, D], in at least float32.

    The K keys, which are values too, are the positions ``chunk.near``, then the entries (pooled keys)
    ``chunk.far``. ``lse_BcN`` is log(sum(exp(scores))) of a query and head, ``delta_BcN`` the sum of
    its output times the output's gradient, ``grad_BcND`` this gradient. ``settings`` are the last
    arguments of ``_scores``: (seen_BSE, doc_ids_BS, window, scale).
    """
    dtype, scale = q_BcND.dtype, settings[-1]
    shares_BcNK = _scores(q_BcND, keys_BKD, chunk, *settings).sub_(lse_BcN.unsqueeze(-1)).exp_()
    grad_BrD = grad_BcND.flatten(1, 2)
    grad_BcNK = _product(grad_BrD, keys_BKD.mT).view(shares_BcNK.shape)
    grad_BcNK.sub_(delta_BcN.unsqueeze(-1)).mul_(shares_BcNK).mul_(scale)
    shares_BrK, grad_BrK = (x.flatten(1, 2).to(dtype) for x in (shares_BcNK, grad_BcNK))
    grad_BKD = _product(grad_BrK.mT, q_BcND.flatten(1, 2))
    grad_BKD += _product(shares_BrK.mT, grad_BrD)
    return _product(grad_BrK, keys_BKD), grad_BKD


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in at least float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return torch.bmm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)
