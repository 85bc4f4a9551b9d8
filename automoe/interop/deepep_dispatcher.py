"""Dispatch through DeepEP: a token is sent once to each rank that holds any of its experts.

The library moves rows; this file wraps it as a dispatcher. The library's combine adds rows without
weights, so the experts apply the weights. The backward of dispatch is combine, and the backward of
combine is dispatch. Shapes: T tokens, K top-k, H hidden, E experts, L of them on this rank, R
distinct tokens received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from automoe.comm.discard_outputs import discard
from automoe.errors import BackendError
from automoe.moe.dispatch.base import RunExperts, run_choices
from automoe.moe.dispatch.wire import scaled
from automoe.quantize.formats import E4M3, LINE, SIDE, quantize

# Numbers [T, H], or e4m3 codes [T, H] and float32 scales [T, H / 128] of their 128 columns.
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Received:
    """The rows and routing that a rank holds after a dispatch.

    Attributes:
        x_RH: the tokens, or their codes and scales if these were sent.
        topk_ids_RK: int64, experts of this rank 0 ... L - 1; -1 for choices of other ranks' experts
            and of no expert.
        weights_RK: float32 routing weights.
        counts: rows of each of the L experts, on the host.
        handle: DeepEP's record of the dispatch, kept while a combine or a second dispatch needs it.
    """

    x_RH: Rows
    topk_ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    counts: list[int]
    handle: Any


class TokenExchange(Protocol):
    """Interface that ``automoe.interop.deepep`` implements for versions 1 and 2 of the library."""

    def dispatch(
        self, x_TH: Rows, topk_ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
    ) -> Received:
        """Dispatch tokens; topk_ids are int64 with -1 for no choice, weights float32."""

    def dispatch_again(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Repeat the dispatch of ``handle`` with rows [T, H] and return [R, H]."""

    def combine(
        self, rows_RH: torch.Tensor, weights_RK: torch.Tensor | None, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum rows and weights on the ranks that they came from: [T, H] and [T, K]."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_TH,
        weights_TK,
        topk_ids_TK,
        num_experts: int,
        exchange: TokenExchange,
        in_8_bits: bool,
        out: list[Received],
    ):
        rows: Rows = x_TH.contiguous()
        if in_8_bits:
            quantized = quantize(x_TH, E4M3, LINE)
            rows = quantized.codes, quantized.scales
        received = exchange.dispatch(rows, topk_ids_TK, weights_TK.contiguous(), num_experts)
        out.append(received)
        ctx.exchange = exchange
        ctx.handle = received.handle
        x_RH = received.x_RH
        if isinstance(x_RH, tuple):
            x_RH = scaled(*x_RH, x_TH.dtype)
        return x_RH, received.weights_RK

    @staticmethod
    def backward(ctx, grad_x_RH: torch.Tensor, grad_weights_RK: torch.Tensor):
        x_TH, weights_TK = ctx.exchange.combine(
            grad_x_RH.contiguous(), grad_weights_RK.contiguous(), ctx.handle
        )
        return x_TH, weights_TK, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RH: torch.Tensor, handle: Any, exchange: TokenExchange) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.handle = handle
        return exchange.combine(rows_RH.contiguous(), None, handle)[0]

    @staticmethod
    def backward(ctx, grad_TH: torch.Tensor):
        return ctx.exchange.dispatch_again(grad_TH.contiguous(), ctx.handle), None, None


class DeepEPDispatcher:
    """Dispatcher over DeepEP.

    Each call has one host sync, within the library, for the number of rows received.

    Args:
        exchange: the library's exchange, shared by all layers since its buffers are large.
        in_8_bits: send tokens in 8 bits; gradients and results stay in bfloat16.
    """

    def __init__(
        self, num_experts: int, num_ranks: int, exchange: TokenExchange, in_8_bits: bool = False
    ) -> None:
        self.num_experts = num_experts
        self.num_local = num_experts // num_ranks
        self.exchange = exchange
        self.in_8_bits = in_8_bits

    def __call__(
        self, x_TH, topk_ids_TK, weights_TK, experts: RunExperts, rows_per_expert=None
    ) -> torch.Tensor:
        """Dispatch, compute and combine; ``automoe.moe.dispatch.base`` lists the shapes.

        Raises:
            BackendError: DeepEP cannot send these rows.
        """
        _check(x_TH, topk_ids_TK, self.in_8_bits)
        topk_ids_TK = topk_ids_TK.masked_fill(topk_ids_TK >= self.num_experts, -1)
        out: list[Received] = []
        wide_TK = weights_TK.to(torch.float32)
        x_RH, weights_RK = _Dispatch.apply(
            x_TH, wide_TK, topk_ids_TK, self.num_experts, self.exchange, self.in_8_bits, out
        )
        received = out[0]
        if isinstance(received.x_RH, tuple):
            discard(x_RH, scaled, *received.x_RH, x_RH.dtype)
        local_ids_RK = received.topk_ids_RK.to(torch.int64)
        local_ids_RK = local_ids_RK.masked_fill(local_ids_RK < 0, self.num_local)
        num_rows = sum(received.counts)
        sums_RH = run_choices(x_RH, local_ids_RK, weights_RK, experts, self.num_local, num_rows)
        return _Combine.apply(sums_RH, received.handle, self.exchange)


def _check(x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, in_8_bits: bool) -> None:
    if in_8_bits and x_TH.shape[1] % SIDE:
        raise BackendError(
            f"DeepEP sends rows in 8 bits of a multiple of {SIDE} columns, and these have {x_TH.shape[1]}. "
            "Set moe.dispatch_dtype=auto"
        )
    row_bytes = x_TH.shape[1] * x_TH.element_size()
    if x_TH.dtype != torch.bfloat16 or row_bytes % 16:
        raise BackendError(
            f"moe.dispatcher=deepep sends bfloat16 rows of a multiple of 16 bytes, and these are {x_TH.dtype} rows of "
            f"{row_bytes} bytes. Set train.dtype=bfloat16 and a model.hidden_size that 8 divides, or "
            "moe.dispatcher=alltoall"
        )
    if topk_ids_TK.dtype != torch.int64:
        raise BackendError(
            f"moe.dispatcher=deepep takes int64 expert ids, and these are {topk_ids_TK.dtype}"
        )
