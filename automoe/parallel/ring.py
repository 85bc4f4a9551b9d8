"""Ring attention (``parallel.context=ring``): keys and values go around the ranks of the cp axis.

A rank's queries attend to the keys of one rank at a time (arXiv 2310.01889), its own first, and
softmaxes over parts are merged. Each rank holds a chunk from the head of a row and its mirror from
the tail, so ranks have equally many pairs of chunks (``automoe.model.rows``; torch cuts rows in
the same way). On CUDA torch's own ring runs, which has no mask but causality; rules refuse
other settings. On the CPU documents are masked by their ids, which all ranks know. With
other values of ``parallel.context`` attention gets whole rows (``automoe.model.rows``) and calls an
ordinary kernel (``automoe.kernels.attention``).

Letters: B rows, P ranks, S positions of a rank, R of the whole row, C = R / 2P of a chunk, N query
heads, G key and value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from automoe.comm.communicators import SINGLE_RANK, Communicator
from automoe.interop.torch_private import cpu_attention, cpu_attention_backward, use_ring_attention
from automoe.kernels.attention import AttentionFn
from automoe.model.attention_masks import MaskFn, QueryBlock, document_ids
from automoe.model.rows import whole_rows


def ring_masks(ranks: Communicator) -> MaskFn:
    """Return the function that makes the masks of ``cpu_ring``, ring attention on the CPU.

    It makes one block of all queries and keys, whose mask is the document ids [B, R] of whole
    sequences, whose R positions ``ranks`` share; None: causality alone.
    """

    def masks(tokens, keys: Communicator, window: int, always: bool) -> list[QueryBlock]:
        assert not window, "a ring has no sliding windows"
        docs_BR = document_ids(whole_rows(tokens, ranks), SINGLE_RANK, always)
        return [QueryBlock(slice(None), slice(None), docs_BR)]

    return masks


def cpu_ring(group: dist.ProcessGroup) -> AttentionFn:
    """Return causal ring attention over the cp ranks ``group``: a function (q, k, v, mask, scale).

    ``mask`` are the document ids [B, R] of whole sequences: a query sees keys of its own document; None: of the whole
    sequence. Attention sinks are not supported.
    """

    def attend(q, k, v, mask, scale: float, sinks=None) -> Tensor:
        """Return attention of q [B, S, N, D], k [B, S, G, D], v [B, S, G, Dv]: [B, S, N, Dv].

        S are this rank's positions, N heads of queries, G of keys; keys and values of the other
        ranks come around the ring.

        Args:
            mask: document ids [B, R] of whole sequences; None: causality alone.
            scale: factor of the products of queries and keys.
            sinks: must be None; a ring has no attention sinks.
        """
        assert sinks is None, "a ring has no sinks"
        value_dim = v.shape[-1]
        kv = torch.stack((k, F.pad(v, (0, q.shape[-1] - value_dim)))).transpose(2, 3)
        out = _Ring.apply(q.transpose(1, 2), kv, mask, scale, group)
        return out[..., :value_dim].transpose(1, 2)

    return attend


def cuda_ring(mesh: DeviceMesh) -> AttentionFn:
    """Return torch's ring attention over the cp axis ``mesh``: a function (q, k, v, mask, scale).

    The function masks by causality alone, and takes no document ids and no attention sinks.
    """
    # From here on, SDPA over DTensors sharded along the sequence runs torch's ring. It stays on for
    # the backward; nothing else in this project calls SDPA with a DTensor.
    use_ring_attention()

    def attend(q, k, v, mask, scale: float, sinks=None) -> Tensor:
        """Return attention of q [B, S, N, D], k [B, S, G, D], v [B, S, G, Dv]: [B, S, N, Dv].

        S are this rank's positions, N heads of queries, G of keys; keys and values of the other
        ranks come around the ring.

        Args:
            mask, sinks: must be None.
            scale: factor of the products of queries and keys.
        """
        assert mask is None and sinks is None, (
            "torch's ring attention has no mask but causality, and no sinks"
        )
        value_dim = v.shape[-1]
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k = k.repeat_interleave(repeats, dim=2)
            v = v.repeat_interleave(repeats, dim=2)
        v = F.pad(v, (0, q.shape[-1] - value_dim))  # flash kernels want equal head dims
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [B, N, S, D]
        cut = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*cut, is_causal=True, scale=scale)
        assert isinstance(out, DTensor)
        return out.to_local()[..., :value_dim].transpose(1, 2)

    return attend


class _Ring(torch.autograd.Function):
    """Autograd function: attention of q [B, N, S, D] to the keys and values of all ranks.

    Its inputs are q; kv [2, B, G, S, D], this rank's keys and values; document ids [B, R] of whole
    sequences, or None; the factor of the products of queries and keys; and the cp group. The result
    has the shape of q.
    """

    @staticmethod
    def forward(ctx, q, kv, docs_BR, scale: float, group: dist.ProcessGroup):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide)
        for source, here in _travel(kv, group):
            for queries, _, keys, values, mask in _pairs(docs_BR, q, here, source, group):
                part, part_lse = cpu_attention(q[:, :, queries], keys, values, mask, scale)
                total = lse[:, :, queries].logaddexp(part_lse)
                out[:, :, queries] *= (lse[:, :, queries] - total).exp().unsqueeze(-1)
                out[:, :, queries] += part * (part_lse - total).exp().unsqueeze(-1)
                lse[:, :, queries] = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.given = docs_BR, scale, group
        return out

    @staticmethod
    def backward(ctx, grad):
        q, kv, out, lse = ctx.saved_tensors
        docs_BR, scale, group = ctx.given
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        grad_kv = torch.zeros_like(
            kv, dtype=lse.dtype
        )  # follows its keys around the ring, and ends on their own rank
        for source, here in _travel(kv, group):
            for queries, theirs, keys, values, mask in _pairs(docs_BR, q, here, source, group):
                rows = (x[:, :, queries].contiguous() for x in (grad, q, out, lse))
                gradients = cpu_attention_backward(*rows, keys, values, mask, scale)
                grad_q[:, :, queries] += gradients[0]
                summed = torch.stack(gradients[1:]).unflatten(2, (kv.shape[2], -1)).sum(3)
                grad_kv[:, :, :, theirs] += summed
            grad_kv, work = _pass_on(grad_kv, group)
            work.wait()
        return grad_q.to(q.dtype), grad_kv.to(kv.dtype), None, None, None


def _travel(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank in ``group``, its keys and values) for each rank; meanwhile those of the next rank are received.

    Keys and values are one tensor [2, B, G, S, D]; ``kv`` has this rank's, which come first.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    for step in range(num_ranks - 1):
        coming, work = _pass_on(kv, group)
        yield (rank - step) % num_ranks, kv
        work.wait()
        kv = coming
    yield (rank + 1) % num_ranks, kv


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to send ``x`` to the next rank of the ring and to receive the previous rank's tensor.

    Returns:
        The buffer that receives, and the handle to wait for.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = ([0] * num_ranks for _ in range(2))
    sent[(rank + 1) % num_ranks] = received[rank - 1] = x.numel()
    coming = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat = x.contiguous().view(-1)
    work = dist.all_to_all_single(coming.view(-1), flat, received, sent, group=group, async_op=True)
    return coming, work


def _pairs(
    docs_BR: Tensor | None, q: Tensor, kv: Tensor, source: int, group: dist.ProcessGroup
) -> Iterator[tuple[Any, ...]]:
    """Yield pairs of a chunk of this rank's queries and a chunk of keys that they see.

    Args:
        docs_BR: document ids of whole sequences; None: a sequence is one document.
        q: this rank's queries [B, N, S, D].
        kv: keys and values [2, B, G, S, D] of the rank ``source`` of ``group``.

    Yields:
        Both chunks as slices of positions; keys and values [B, N, C, D] of the second, each head
        repeated for the query heads that share it; a mask [B, 1, C, C], True where a query sees a
        key, or None if all queries see all keys.
    """
    last, chunk = 2 * dist.get_world_size(group) - 1, q.shape[2] // 2
    rank = dist.get_rank(group)
    for i, queries in enumerate((rank, last - rank)):
        # A query's own chunk comes first, so that it always has a key.
        for j, theirs in ((1, last - source), (0, source)):
            mask = None
            if theirs == queries:
                mask = torch.ones(1, 1, chunk, chunk, dtype=torch.bool).tril()
            if docs_BR is not None:
                docs = docs_BR.unflatten(1, (-1, chunk))
                same = (docs[:, queries, :, None] == docs[:, theirs, None])[:, None]
                mask = same if mask is None else mask & same
            if theirs <= queries and (mask is None or bool(mask.any())):
                place = [slice(at * chunk, (at + 1) * chunk) for at in (i, j)]
                shared = kv[:, :, :, place[1]].repeat_interleave(q.shape[1] // kv.shape[2], 2)
                yield *place, *shared, mask
