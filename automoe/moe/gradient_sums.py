"""Expert weight gradients that are accumulated into FSDP's sums (``parallel.expert_wgrad``).

A gradient that autograd returns is written to memory; FSDP then reads it and the sum of the step's
earlier micro-batches, and writes the new sum. A matrix product that accumulates into the sum saves
this traffic (Megatron-Core's gradient accumulation fusion). Shapes: E experts, R rows sorted by
expert, N output and K input features of a matrix [E, N, K].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from automoe.comm.local_shard import local_shard
from automoe.interop.torch_fsdp import gradient_sum

Ends = Callable[[], list[int]]  # returns the end of each expert's rows
Later = Callable[[Callable[[], None]], None]  # takes a function and calls it later


@dataclass(frozen=True)
class GradientSums:
    """Accumulator of the gradients of one MoE layer's expert matrices over a step's micro-batches.

    Args:
        experts: module whose parameters are the matrices, wrapped by FSDP or not.
        later: function that defers a weight gradient: it is given a callable without arguments
            that computes one, and calls it while gradients of tokens are being sent to other
            ranks; None: weight gradients are computed at once.
    """

    experts: nn.Module
    later: Later | None = None

    def find(self, name: str) -> Tensor | None:
        """Return the tensor in which this rank sums gradients of the matrix ``name``; None if frozen.

        ``name`` is gate_up_proj or down_proj. If there is no such tensor yet, it is made of zeros.
        """
        parameter = getattr(self.experts, name)
        if not parameter.requires_grad:
            return None
        if isinstance(self.experts, FSDPModule):
            for other, candidate in self.experts.named_parameters(recurse=False):
                if candidate.requires_grad:  # FSDP reduces all gradients of a unit in one dtype
                    gradient_sum(self.experts, other)
            return local_shard(gradient_sum(self.experts, name))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local_shard(parameter.grad)

    def add(
        self,
        name: str,
        grad_RN: Tensor,
        x_TK: Tensor,
        gather_idx_R: Tensor | None,
        ends: Ends,
        travels: bool,
    ) -> None:
        """Add the gradient of the matrix ``name``, grad.T @ x of each expert's rows, to its sum.

        Args:
            name: name of the matrix, gate_up_proj or down_proj.
            grad_RN: gradient of the matrix's outputs, rows sorted by expert.
            x_TK: inputs of the matrix.
            gather_idx_R: row of x that belongs to each row of ``grad``; None: x is in that order.
            ends: function that returns the end of each expert's rows, on the host.
            travels: True if gradients of tokens will be sent to other ranks after this call;
                ``self.later``, if set, then computes the product while they are sent.
        """
        product = partial(self._add, name, grad_RN, x_TK, gather_idx_R, ends)
        if travels and self.later is not None:
            self.later(product)
        else:
            product()

    @torch.no_grad()
    def _add(self, name, grad_RN, x_TK, gather_idx_R, ends: Ends) -> None:
        sum_ENK = self.find(name)
        if sum_ENK is None:
            return
        rows_RK = x_TK if gather_idx_R is None else x_TK.index_select(0, gather_idx_R)
        start = 0
        for end, sum_NK in zip(ends(), sum_ENK.flatten(1, -2), strict=True):
            add_product(sum_NK, grad_RN[start:end], rows_RK[start:end])
            start = end


def add_product(sum_NK: Tensor, grad_RN: Tensor, x_RK: Tensor) -> None:
    """Add grad.T @ x to ``sum_NK`` in place, without rounding the product to the dtype of its operands."""
    if sum_NK.dtype == grad_RN.dtype:
        sum_NK.addmm_(grad_RN.T, x_RK)
    elif sum_NK.is_cuda:
        torch.addmm(sum_NK, grad_RN.T, x_RK, out_dtype=sum_NK.dtype, out=sum_NK)
    else:  # the CPU has no product with a wider result
        sum_NK.addmm_(grad_RN.T.to(sum_NK.dtype), x_RK.to(sum_NK.dtype))


def read_later(offsets_E: Tensor) -> Ends:
    """Start a copy of ``offsets_E`` to the host; return a function that returns it as a list.

    The function waits for the copy, which by the backward pass has long finished.
    """
    if offsets_E.is_cpu:
        ends = offsets_E.tolist()
        return lambda: ends
    copy_E = offsets_E.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return copy_E.tolist()

    return read
