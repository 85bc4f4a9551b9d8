"""Matrix products and lookups that work on any shard of the weight that this rank holds.

Under tensor parallelism a weight is a DTensor, and a rank multiplies by its own shard. The module's
``Communicator`` gathers the tokens before the product and sums the results after it. Letters: B
rows, S positions, H hidden, V vocabulary, I input and O output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automoe.comm.communicators import Communicator
from automoe.comm.local_shard import local_shard
from automoe.quantize.packed import linear

Features = tuple[slice, ...] | None  # ranges of output features; None: all


def take_features(x: Tensor, features: Features) -> Tensor:
    """Return the rows (output features) of a weight or bias in the slices ``features``; None: all."""
    if features is None:
        return x
    return x[features[0]] if len(features) == 1 else torch.cat([x[each] for each in features])


class Linear(nn.Module):
    """Linear layer ``x @ weight.T + bias`` with weight [O, I] and an optional bias [O].

    Args:
        features: output features to use, if the rank holds the whole weight but needs only some.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, features: Features = None
    ) -> None:
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BSI: Tensor) -> Tensor:
        return self.multiply(x_BSI, None if self.bias is None else self.shard(self.bias))

    def project_and_scatter(self, x_BSI: Tensor, tp: Communicator) -> Tensor:
        """Return x @ weight.T + bias at this rank's positions, for input features sharded over tp.

        Each rank multiplies its own input features x [B, S, I / tp]; a reduce-scatter over ``tp``
        sums the terms, and the bias is added once.
        """
        out_BSO = tp.reduce_scatter(self.multiply(x_BSI))
        return out_BSO if self.bias is None else out_BSO + local_shard(self.bias)

    def multiply(self, x_BSI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias_O, with this rank's shard of the weight. Subclasses override it.

        If ``self.features`` is not None, only these output features are computed.
        """
        return linear(x_BSI, self.shard(self.weight), bias_O)

    def shard(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a weight or bias; of that only the rows in ``self.features``, if set."""
        return take_features(local_shard(parameter), self.features)


class _Lookup(torch.autograd.Function):
    """Autograd function: ``F.embedding(ids, weight)`` for the CPU; it sums the gradient in float32.

    Torch sums the gradient in the weight's dtype. In bfloat16 a token that occurs often stops
    adding to its row once the sum is a few hundred terms large.
    """

    @staticmethod
    def forward(ctx, ids_BS, weight_VH):
        ctx.save_for_backward(ids_BS)
        ctx.shape = weight_VH.shape
        return F.embedding(ids_BS, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BSH):
        (ids_BS,) = ctx.saved_tensors
        wide = torch.promote_types(grad_BSH.dtype, torch.float32)
        grad_VH = grad_BSH.new_zeros(ctx.shape, dtype=wide)
        grad_VH.index_add_(0, ids_BS.flatten(), grad_BSH.flatten(0, -2).to(wide))
        return None, grad_VH.to(grad_BSH.dtype)


def _lookup(ids_BS: Tensor, weight_VH: Tensor) -> Tensor:
    narrow = weight_VH.dtype in (torch.bfloat16, torch.float16)
    lookup = _Lookup.apply if narrow and weight_VH.device.type == "cpu" else F.embedding
    return lookup(ids_BS, weight_VH)


class Embedding(nn.Module):
    """Token embedding [V, H], of which this rank may hold some rows; other ids give zeros.

    ``first_id`` is the token id of the first row that this rank holds.
    """

    def __init__(self, vocab_size: int, hidden_size: int, first_id: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocab_size = vocab_size
        self.first_id = first_id

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return this rank's term [B, S, H] of the embeddings, which the caller sums over tp ranks.

        Args:
            ids_BS: int64 token ids.
        """
        weight_VH = local_shard(self.weight)
        if weight_VH.shape[0] == self.vocab_size:
            return _lookup(ids_BS, weight_VH)
        ids_BS = ids_BS - self.first_id
        elsewhere_BS = (ids_BS < 0) | (ids_BS >= weight_VH.shape[0])
        out_BSH = _lookup(ids_BS.masked_fill(elsewhere_BS, 0), weight_VH)
        return out_BSH.masked_fill(elsewhere_BS.unsqueeze(-1), 0)
