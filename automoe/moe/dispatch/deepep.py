"""Dispatch through DeepEP: a token travels once to each rank that holds any of its experts.

The library moves rows; this file makes a dispatcher of it. Combining adds rows without weights, so weights
are applied by the experts, and the adjoint of sending is combining and the other way round.
Shapes: T tokens, K top-k, H hidden, E experts, L of them on this rank, N distinct tokens received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from automoe.errors import BackendError
from automoe.moe.dispatch.base import Experts, group_ends, sort_by_expert, sum_to_tokens
from automoe.moe.dispatch.measure import count_host_sync, stage


@dataclass(frozen=True)
class Received:
    """What a rank holds after a dispatch.

    Attributes:
        x: [N, H].
        ids: [N, K] int64, experts of this rank 0 ... L - 1; -1 for choices of other ranks and of none.
        weights: [N, K] float32.
        counts: rows of each of the L experts, on the host.
        handle: the way back; keep it as long as a combine or a second dispatch is to come.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counts: list[int]
    handle: Any


class TokenExchange(Protocol):
    """What ``automoe.interop.deepep`` makes of either line of the library."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Received:
        """x [T, H], ids [T, K] int64 with -1 for none, weights [T, K] float32."""
        ...

    def dispatch_again(self, x: torch.Tensor, handle: Any) -> torch.Tensor:
        """x [T, H] -> [N, H], to where ``handle``'s dispatch sent."""
        ...

    def combine(
        self, rows: torch.Tensor, weights: torch.Tensor | None, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """rows [N, H] and weights [N, K] -> their sums [T, H] and [T, K] on the ranks they came from."""
        ...


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, ids, num_experts: int, exchange: TokenExchange, out: list[Received]):
        received = exchange.dispatch(x.contiguous(), ids, weights.contiguous(), num_experts)
        out.append(received)
        ctx.exchange, ctx.handle = exchange, received.handle
        return received.x, received.weights

    @staticmethod
    def backward(ctx, grad_x: torch.Tensor, grad_weights: torch.Tensor):
        x, weights = ctx.exchange.combine(grad_x.contiguous(), grad_weights.contiguous(), ctx.handle)
        return x, weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, handle: Any, exchange: TokenExchange) -> torch.Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        return exchange.combine(rows.contiguous(), None, handle)[0]

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.exchange.dispatch_again(grad.contiguous(), ctx.handle), None, None


class DeepEPDispatcher:
    """One host sync a call, within the library: the number of rows received sizes the buffer.

    Args:
        exchange: shared by all layers, since its buffers are large.
    """

    def __init__(self, num_experts: int, num_ranks: int, exchange: TokenExchange) -> None:
        self.num_experts, self.num_local, self.exchange = num_experts, num_experts // num_ranks, exchange

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Experts,
        rows_per_expert: int | None = None,
    ) -> torch.Tensor:
        """See the package's docstring for shapes.

        Raises:
            BackendError: rows that DeepEP cannot send.
        """
        _check(x, ids)
        with stage("a2a_dispatch"):
            ids = ids.masked_fill(ids >= self.num_experts, -1)
            out: list[Received] = []
            count_host_sync()
            rows, row_weights = _Dispatch.apply(x, weights.to(torch.float32), ids, self.num_experts, self.exchange, out)
            received = out[0]
        with stage("permute"):
            local = received.ids.to(torch.int64)
            order, counts = sort_by_expert(local.masked_fill(local < 0, self.num_local), self.num_local)
            order = order[: sum(received.counts)]
            row_idx = order // ids.shape[1]
            probs = row_weights.flatten()[order]
        computed = experts(rows, row_idx, group_ends(counts), probs)
        with stage("unpermute"):
            sums = sum_to_tokens(computed, row_idx, rows.shape[0])
        with stage("a2a_combine"):
            return _Combine.apply(sums, received.handle, self.exchange)


def _check(x: torch.Tensor, ids: torch.Tensor) -> None:
    row_bytes = x.shape[1] * x.element_size()
    if x.dtype != torch.bfloat16 or row_bytes % 16:
        raise BackendError(
            f"moe.dispatcher=deepep sends bfloat16 rows of a multiple of 16 bytes, and these are {x.dtype} rows of "
            f"{row_bytes} bytes. Set train.dtype=bfloat16 and a model.hidden_size that 8 divides, or "
            "moe.dispatcher=alltoall"
        )
    if ids.dtype != torch.int64:
        raise BackendError(f"moe.dispatcher=deepep takes int64 expert ids, and these are {ids.dtype}")
