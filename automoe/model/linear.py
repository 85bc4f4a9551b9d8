"""Matrix products and lookups that work on whatever part of the weight this rank holds.

Under tensor parallelism a weight is a DTensor, and what a rank multiplies by is its own slice; who gathers
the tokens before and adds up the results after is the ``Communicator`` that a module is given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from automoe.moe.communicators import Communicator


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a DTensor, differentiable; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Linear(nn.Module):
    """``x @ weight.T + bias``, weight [out, in], bias [out] or none.

    ``rows`` restricts the product to some output rows: where key/value heads are fewer than the ranks
    that share them, each rank keeps the whole weight and uses one head of it. ``product`` computes it: of x,
    weight and bias or None.
    """

    product: Callable[..., torch.Tensor]

    def __init__(self, in_features: int, out_features: int, bias: bool = False, rows: slice | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.product = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = local_part(self.weight), None if self.bias is None else local_part(self.bias)
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        return self.product(x, weight, bias)

    def reduce_scatter(self, x: torch.Tensor, sequence: Communicator) -> torch.Tensor:
        """The product of ranks that each have some input features: their terms summed, then the bias, once."""
        out = sequence.reduce_scatter(self.product(x, local_part(self.weight)))
        return out if self.bias is None else out + local_part(self.bias)


class _Lookup(torch.autograd.Function):
    """``F.embedding`` whose gradient is summed in float32, for the CPU: torch sums it in the weight's dtype.

    In bfloat16 a token that occurs often stops adding to its row once the sum is a few hundred terms large.
    """

    @staticmethod
    def forward(ctx, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        (ids,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        rows = grad.new_zeros(ctx.shape, dtype=wide)
        rows.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(wide))
        return None, rows.to(grad.dtype)


def _lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return _Lookup.apply(ids, weight) if narrow and weight.device.type == "cpu" else F.embedding(ids, weight)


class Embedding(nn.Module):
    """Token embedding, weight [V, H]; ids outside this rank's rows of the weight give zeros.

    ``first_id`` is the id of the first row that this rank holds.
    """

    def __init__(self, vocab_size: int, hidden_size: int, first_id: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocab_size, self.first_id = vocab_size, first_id

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B, S] int64 -> [B, S, H]: this rank's share of the sum over ranks."""
        weight = local_part(self.weight)
        if weight.shape[0] == self.vocab_size:
            return _lookup(ids, weight)
        ids = ids - self.first_id
        elsewhere = (ids < 0) | (ids >= weight.shape[0])
        return _lookup(ids.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)
