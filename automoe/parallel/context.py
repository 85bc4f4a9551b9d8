"""Context parallelism: each rank of the cp axis holds a part of every row.

Attention gathers keys and values (for MLA, latents) of all ranks (``ProcessGroupCollection.keys``),
puts them in the order of the row, and computes for each chunk of queries the keys before its end
(``automoe.config.context.query_blocks``). With ``parallel.context=ring`` keys and values go around
a ring instead, and softmaxes are merged: on the CPU by ``automoe.parallel.ring``, on CUDA by
torch's ring attention. Torch's supports causality and head-tail balanced shards (its load balancer
cuts rows as ``head_tail_index`` does) but no documents; validation refuses other settings.

Letters: R positions of the whole row, and those of ``automoe.model.attention``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from automoe.interop.torch_private import use_ring_attention
from automoe.kernels.attention import AttentionFn


def head_tail_index(seq_len: int, cp: int, rank: int) -> Tensor:
    """Return the row positions [R / cp] of cp rank ``rank``.

    The row is cut into 2 cp chunks, and a rank holds one chunk from the head and its mirror from
    the tail: under causal attention every rank then has the same number of (query, key) pairs.
    """
    chunk = seq_len // (2 * cp)
    head = torch.arange(rank * chunk, (rank + 1) * chunk)
    tail = torch.arange((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk)
    return torch.cat((head, tail))


def ring_attention(mesh: DeviceMesh) -> AttentionFn:
    """Return torch's ring attention over the cp axis ``mesh``: plain causality, no sinks."""
    # From here on, SDPA over DTensors sharded along the sequence runs torch's ring. It stays on for
    # the backward; nothing else in this project calls SDPA with a DTensor.
    use_ring_attention()

    def attend(q, k, v, mask, scale: float, sinks=None) -> Tensor:
        """Map this rank's q [B, S, N, D], k [B, S, G, D], v [B, S, G, Dv] to [B, S, N, Dv]."""
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
