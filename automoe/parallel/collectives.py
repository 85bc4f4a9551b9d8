"""Differentiable collectives under one name each.

torch 2.13 renamed the functional collectives that 2.11 has (``..._tensor_autograd`` became
``..._single_autograd``) and warns at every call of the old ones; this file is the only one that knows. Results may be torch's
asynchronous tensors, which wait when an operation of torch first reads them and have no storage for kernels that read by
pointer: those get them from ``arrived``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_all_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_reduce_scatter = (
    getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd
)


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate every rank's ``x`` (equal shapes) along ``dim``; the gradient is a reduce-scatter."""
    if x.requires_grad:
        return _all_gather(x.contiguous(), dim, group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum ``x`` over ranks and keep this rank's equal part of ``dim``; the gradient is an all-gather."""
    return _reduce_scatter(x.contiguous(), "sum", dim, group)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: functional.AsyncCollectiveTensor) -> torch.Tensor:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def arrived(x: Any) -> Any:
    """``x`` waited for and plain where it is one of torch's asynchronous tensors; anything else as it is."""
    return _Arrived.apply(x) if isinstance(x, functional.AsyncCollectiveTensor) else x


class GroupCommunicator:
    """The ``Communicator`` of a process group: the r-th shard of the positions is on its rank r."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 1, self.group)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(x, 1, self.group)

    def local_shard(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(self.num_ranks, dim=1)[self.rank]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def _all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, op, group=self.group)
        return x


def all_to_all(
    x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send ``input_splits[r]`` rows of ``x`` to rank r and receive ``output_splits[r]``; the gradient goes back."""
    return functional.all_to_all_single_autograd(x.contiguous(), output_splits, input_splits, group)
