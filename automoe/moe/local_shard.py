"""This rank's shard of a tensor, whether the tensor is a DTensor or not."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from automoe.interop.torch_private import offset_of_shard


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, differentiably; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the index in the full tensor of the first element of ``local_shard(tensor)``."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return offset_of_shard(tensor)
