"""Ring attention on CUDA: torch's own, over the cp axis. Keys and values travel, softmaxes are merged.

Torch's ring knows causality and head-tail balanced shards (its load balancer cuts rows as
``head_tail_index`` does) but no documents, and has kernels for CUDA alone; validation refuses the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_SEQUENCE_DIM = 2  # of [B, heads, S, D]


class RingAttention:
    """The signature of ``automoe.model.attention.attend``, over all ranks of the cp axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor.experimental._attention import _enable_context_parallel_dispatcher

        self.mesh = mesh
        # From here on SDPA over DTensors that are cut along the sequence runs torch's ring, in
        # backward too, so it stays on; nothing else in this project hands SDPA a DTensor.
        _enable_context_parallel_dispatcher()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [B, S, N, D], k [B, S, G, D], v [B, S, G, Dv] of this rank -> [B, S, N, Dv]."""
        assert mask is None and sinks is None, "torch's ring attention has no mask but causality, and no sinks"
        value_dim, repeats = v.shape[-1], q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        v = F.pad(v, (0, q.shape[-1] - value_dim))  # flash kernels want equal head dims
        cut = [
            DTensor.from_local(x.transpose(1, 2).contiguous(), self.mesh, [Shard(_SEQUENCE_DIM)], run_check=False)
            for x in (q, k, v)
        ]
        out = F.scaled_dot_product_attention(*cut, is_causal=True, scale=scale)
        assert isinstance(out, DTensor)
        return out.to_local()[..., :value_dim].transpose(1, 2)
