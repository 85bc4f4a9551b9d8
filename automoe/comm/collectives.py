"""Differentiable collectives, each under one name for all backends.

Results may be torch's asynchronous tensors, which wait when a torch operation first reads them.
They have no storage for kernels that read by pointer; such kernels need ``wait_tensor``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import automoe.interop.torch_private as torch_private
from automoe.comm.communicators import SINGLE_RANK, Communicator
from automoe.interop.torch_private import AsyncTensor


def over_gloo(group: dist.ProcessGroup) -> bool:
    """Return True if ``group`` uses only gloo, whose reduce-scatter and all-gather are slow.

    Gloo's reduce-scatter is an all-reduce, and its all-gather is a ring. An all-to-all, followed by
    a sum in the order of the ranks, takes half the CPU time.
    """
    return dist.get_backend(group) == "gloo"


class _ExchangeParts(torch.autograd.Function):
    """Autograd function: all-to-all of x [P, ...], where slice r goes to and comes from rank r."""

    @staticmethod
    def forward(ctx, x_P, group: dist.ProcessGroup):
        ctx.group = group
        out_P = torch.empty_like(x_P, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out_P, x_P.contiguous(), group=group)
        return out_P

    @staticmethod
    def backward(ctx, grad_P):
        return _ExchangeParts.apply(grad_P, ctx.group), None


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's ``x`` (equal shapes) along ``dim``; backward is a reduce-scatter."""
    if x.requires_grad and over_gloo(group):
        parts = _ExchangeParts.apply(x.expand(dist.get_world_size(group), *x.shape), group)
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)
    if x.requires_grad:
        return torch_private.all_gather(x.contiguous(), dim, group)
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over ranks, keep this rank's equal shard of ``dim``; backward is an all-gather."""
    if over_gloo(group):
        return _ExchangeParts.apply(
            torch.stack(x.chunk(dist.get_world_size(group), dim)), group
        ).sum(0)
    return torch_private.reduce_scatter(x.contiguous(), "sum", dim, group)


class GlooReduceScatter:
    """Reduce-scatter over gloo for FSDP, made of an all-to-all and a sum.

    ``FSDPModule.set_custom_reduce_scatter`` takes an instance.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum ``input_tensor`` [P * N], slice r for rank r, over P ranks into ``output_tensor`` [N].

        The result is there on return. ``op`` must be SUM, and ``async_op`` False.
        """
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(-1, output_tensor.numel()), dim=0, out=output_tensor)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: AsyncTensor):
        return x.trigger_wait()

    @staticmethod
    def backward(ctx, grad):
        return grad


def wait_tensor(x: Any) -> Any:
    """Return an asynchronous collective's tensor as a plain tensor, once it has arrived.

    Differentiable. Any other value is returned as it is.
    """
    return _Wait.apply(x) if isinstance(x, AsyncTensor) else x


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, communicator: Communicator):
        ctx.communicator = communicator
        return communicator.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.communicator.all_reduce(grad), None


class _Group:
    """Process group of ``num_ranks`` ranks, in which this rank is number ``rank``.

    Its collectives are differentiable and work along ``dim``, which subclasses set.
    """

    dim = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the x of all ranks, equal in shape, in rank order along ``dim``; reduce-scatter gradients."""
        return all_gather(x, self.dim, self.group)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum x over the ranks and return this rank's equal part of ``self.dim``; gradients are all-gathered."""
        return reduce_scatter(x, self.dim, self.group)


class GroupCommunicator(_Group, Communicator):
    """Communicator over a ``torch.distributed`` group; rank r holds the r-th slice of positions (dim 1)."""

    dim = 1

    def all_to_all(self, x_P: Tensor) -> Tensor:
        return _ExchangeParts.apply(x_P, self.group)

    def local_shard(self, x: Tensor) -> Tensor:
        return x.chunk(self.num_ranks, dim=1)[self.rank]

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, op, group=self.group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self.all_reduce(x, dist.ReduceOp.MAX)


def communicator(group: dist.ProcessGroup | None) -> Communicator:
    """Return the communicator of ``group``; None: that of this rank alone, which sends nothing."""
    return SINGLE_RANK if group is None else GroupCommunicator(group)


class DispatchGroup(_Group):
    """Process group over which dispatchers send tokens to experts, in tensors split on dim 0.

    Exchanges of tokens are differentiable, and may return before their data has arrived: call
    ``wait`` if anything other than torch reads the data. Copies of a model share a group, because a
    process group cannot be copied.

    Attributes:
        in_8_bits: tokens are sent to the experts in 8 bits (``automoe.moe.dispatch.wire``); results
            and gradients are not.
    """

    def __init__(self, group: dist.ProcessGroup, in_8_bits: bool = False) -> None:
        super().__init__(group)
        self.in_8_bits = in_8_bits

    def all_to_all(self, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        """Send ``input_splits[r]`` rows of x to rank r and receive ``output_splits[r]`` from it.

        Gradients are sent back to the ranks that the rows came from.
        """
        return torch_private.all_to_all(x.contiguous(), output_splits, input_splits, self.group)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Send n counts to each of P ranks and return n from each, in rank order: [P n] int64 -> [P n]."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        return received

    def wait(self, x: Tensor) -> Tensor:
        """Return ``x`` once its data has arrived."""
        return wait_tensor(x)

    def __deepcopy__(self, memo: dict) -> DispatchGroup:
        return self
