"""DeepEP v1 (``Buffer``) and v2 (``ElasticBuffer``) behind one interface, and dispatch through it.

The calls follow the signatures of v1.2.1 and 2.1.0 as published in their sources; this project has
not run them on a GPU. DeepEP is built from its sources: the only release on the package index does
not compile. Every name comes from ``deep_ep`` itself, since its inner modules moved between the two
versions. Calls run in the order of the current stream, unless another micro-batch's forward or
backward pass overlaps: then the stream waits for the ``EventOverlap`` that a call returns.

A token is sent once to each rank that holds any of its experts. The library's combine adds rows
without weights, so the experts apply the weights. The backward of dispatch is combine, and the
backward of combine is dispatch. Shapes: T tokens of this rank, H hidden, K top-k, E experts, L of
them on this rank, R distinct tokens received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from automoe.comm.collectives import DispatchGroup
from automoe.errors import BackendError, import_backend
from automoe.moe.dispatch.base import RunExperts, run_choices
from automoe.moe.dispatch.wire import dequantize_rows
from automoe.parallel.overlap import MERGED_PASSES, OverlappedDispatch
from automoe.passes.discard_outputs import discard
from automoe.quantize.formats import E4M3, LINE, SIDE, quantize

# Group sizes in v1's published tables of settings.
V1_GROUP_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
# Bytes of a number in the widest rows: gradients and results are bfloat16 if tokens are in 8 bits.
_WIDE = 2
NUM_SMS = 20  # of both versions: v2's own estimate divides by an RDMA bandwidth that may read zero
# Buffers of this process, which every rank makes in the same order. One that has grown too small is
# kept too, since handles in flight refer to it.
_buffers: list[Any] = []


# Called with a function that makes the current stream wait for an exchange that has been started.
Finish = Callable[[Callable[[], object]], None]


# Numbers [T, H], or e4m3 codes [T, H] and float32 scales [T, H / 128] of their 128 columns.
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Received:
    """Tokens and routing that a rank holds after a dispatch by DeepEP.

    Attributes:
        x_RH: the R distinct tokens received, or their codes and scales if these were sent.
        topk_ids_RK: int64, their top-k choices as numbers 0 ... L - 1 of this rank's L experts; -1
            for choices of other ranks' experts and of no expert.
        probs_RK: float32 routing weights.
        counts: tokens for each of the L experts, on the host.
        handle: DeepEP's record of the dispatch, kept while a combine or a second dispatch needs it.
    """

    x_RH: Rows
    topk_ids_RK: torch.Tensor
    probs_RK: torch.Tensor
    counts: list[int]
    handle: Any


def dispatcher(num_experts: int, ep: DispatchGroup) -> DeepEPDispatcher:
    """Return the dispatcher of ``moe.dispatcher=deepep`` for a layer's experts.

    Args:
        num_experts: number of experts on all ranks of ``ep``, which have equal parts of them.
        ep: expert-parallel group. With an ``OverlappedDispatch``, another micro-batch's forward or
            backward pass runs during an exchange.

    Raises:
        BackendError: DeepEP is not installed, or does not support this group.
    """
    finish = MERGED_PASSES.overlap if isinstance(ep, OverlappedDispatch) else None
    return DeepEPDispatcher(num_experts, ep.num_ranks, open_deepep(ep.group, finish), ep.in_8_bits)


def open_deepep(group: dist.ProcessGroup, finish: Finish | None = None) -> TokenExchange:
    """Return the token exchange over ``group`` by the installed DeepEP, v1 or v2.

    Its first call allocates buffers.

    Args:
        finish: function that is called after each exchange was started. Its argument is a function
            that makes the current stream wait for the exchange; it must be called before the
            results are used. None: every exchange waits at once.

    Raises:
        BackendError: DeepEP is not installed, or does not support this group; the message names
            ``alltoall``.
    """
    remedy = "Build DeepEP from its sources, or set moe.dispatcher=alltoall"
    deep_ep = import_backend("deep_ep", "moe.dispatcher=deepep", remedy)
    return (
        ElasticExchange(deep_ep, group, finish)
        if hasattr(deep_ep, "ElasticBuffer")
        else BufferExchange(deep_ep, group, finish)
    )


def close_deepep() -> None:
    """Destroy this process's DeepEP buffers, before process groups are destroyed. Collective.

    A buffer that lives until Python exits then waits for ranks that have gone, and
    ``destroy_process_group`` waits for the buffer (NVIDIA-NeMo/Automodel#2686).
    """
    while _buffers:
        _buffers.pop(0).destroy()


def hidden_size(rows: Rows) -> int:
    """Return the hidden size H of tokens [T, H], or of the 8-bit codes that stand for them."""
    return (rows[0] if isinstance(rows, tuple) else rows).shape[1]


class TokenExchange:
    """Base of DeepEP's two versions: an exchange of tokens over a group, with shared buffers.

    All layers share the buffers. A subclass has ``_make_buffer(*sizes)``, which allocates them, and
    ``dispatch(x_TH, topk_ids_TK, probs_TK, num_experts) -> Received``; topk_ids_TK are int64 with
    -1 for no choice, probs_TK (routing weights) float32.

    Attributes:
        _later: keyword with which a call of this version is asynchronous.
        _options: further keyword arguments of every call that dispatches.

    Args:
        deep_ep: the imported module ``deep_ep``.
        finish: function that is called after each exchange was started, with a function that makes the current
            stream wait for it. None: every exchange waits at once.
    """

    _later: str  # the version's name of the option for asynchronous calls
    _options: dict[str, int] = {}  # of every call that dispatches

    def __init__(self, deep_ep: Any, group: dist.ProcessGroup, finish: Finish | None) -> None:
        self._deep_ep = deep_ep
        self._group = group
        self._finish = finish
        self._buffer: Any = None
        self._sizes: tuple[int, ...] = ()

    def _grown(self, *sizes: int) -> Any:
        """Return the shared buffer, replaced by a larger one if it is too small. Collective.

        Args:
            sizes: arguments of ``_make_buffer``: bytes of a row (v1), or tokens, hidden size and
                top-k (v2).
        """
        before = self._sizes or (0,) * len(sizes)
        if any(new > old for new, old in zip(sizes, before, strict=True)):
            self._sizes = tuple(map(max, sizes, before))
            self._buffer = self._make_buffer(*self._sizes)
            _buffers.append(self._buffer)
        return self._buffer

    def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call ``function`` of DeepEP, and return its results without the last one, an event.

        With a ``finish`` function the call is asynchronous, and ``finish`` decides when the current
        stream waits for the event. Without one the call itself waits.
        """
        if self._finish is None:
            return function(*args, **named)[:-1]
        *results, event = function(*args, **named, **{self._later: True})
        self._finish(event.current_stream_wait)
        return results

    def combine(self, rows_RH, probs_RK, handle: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send experts' outputs back to the ranks of their tokens, and sum them for each of T tokens.

        Args:
            rows_RH: outputs for the R tokens that ``dispatch`` brought here.
            probs_RK: routing weights (or their gradients) to send back as well, or None.
            handle: DeepEP's record of that dispatch.

        Returns:
            ([T, H] sum for each token of this rank, [T, K] weights or None).
        """
        buffer, layout = handle
        return self._call(buffer.combine, rows_RH, layout, topk_weights=probs_RK)

    def dispatch_again(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send other rows of the same tokens along the routes of an earlier dispatch.

        Returns the R rows received, [R, H], in the order of that dispatch.

        Args:
            x_TH: a row for each of this rank's T tokens.
            handle: DeepEP's record of that dispatch.
        """
        buffer, layout = handle
        return self._call(buffer.dispatch, x_TH, handle=layout, **self._options)[0]


class BufferExchange(TokenExchange):
    """Exchange of tokens by ``Buffer`` of DeepEP v1: NVLink within a node, RDMA between nodes.

    Raises:
        BackendError: DeepEP v1 has no settings for the number of ranks of the group.
    """

    _later = "async_finish"

    def __init__(self, deep_ep: Any, group: dist.ProcessGroup, finish: Finish | None) -> None:
        size = group.size()
        if size not in V1_GROUP_SIZES:
            raise BackendError(
                f"mesh.ep={size}: DeepEP v1 has settings for {', '.join(map(str, V1_GROUP_SIZES))} ranks. "
                "Choose one of them, or set moe.dispatcher=alltoall"
            )
        super().__init__(deep_ep, group, finish)
        self._size = size

    def dispatch(self, x_TH, topk_ids_TK, probs_TK, num_experts: int) -> Received:
        buffer = self._grown(_WIDE * hidden_size(x_TH))
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            topk_ids_TK, num_experts
        )
        x_RH, topk_ids_RK, probs_RK, counts, handle = self._call(
            buffer.dispatch,
            x_TH,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_ids_TK,
            topk_weights=probs_TK,
        )
        return Received(x_RH, topk_ids_RK, probs_RK, counts, (buffer, handle))

    def _make_buffer(self, row_bytes: int) -> Any:
        buffer_class = self._deep_ep.Buffer
        buffer_class.set_num_sms(NUM_SMS)
        configs = [
            buffer_class.get_dispatch_config(self._size),
            buffer_class.get_combine_config(self._size),
        ]
        nvlink = max(c.get_nvl_buffer_size_hint(row_bytes, self._size) for c in configs)
        # A build for one node only has no RDMA hint to give, and needs no such buffer.
        rdma = 0
        if self._size > 8:
            rdma = max(c.get_rdma_buffer_size_hint(row_bytes, self._size) for c in configs)
        return buffer_class(self._group, nvlink, rdma, explicitly_destroy=True)


class ElasticExchange(TokenExchange):
    """Exchange of tokens by ``ElasticBuffer`` of DeepEP v2, over NCCL's device interface."""

    _later = "async_with_compute_stream"
    _options = {"num_sms": NUM_SMS}

    def dispatch(self, x_TH, topk_ids_TK, probs_TK, num_experts: int) -> Received:
        num_tokens, top_k = topk_ids_TK.shape
        buffer = self._grown(num_tokens, hidden_size(x_TH), top_k)
        x_RH, topk_ids_RK, probs_RK, handle = self._call(
            buffer.dispatch,
            x_TH,
            topk_idx=topk_ids_TK.to(self._deep_ep.topk_idx_t),
            topk_weights=probs_TK,
            num_experts=num_experts,
            do_cpu_sync=True,
            do_expand=False,
            **self._options,
        )
        return Received(
            x_RH, topk_ids_RK, probs_RK, handle.num_recv_tokens_per_expert_list, (buffer, handle)
        )

    def _make_buffer(self, num_tokens: int, hidden: int, top_k: int) -> Any:
        # ElasticBuffer takes the group's NCCL communicator, which is null before the group's first
        # collective (DeepEP#726).
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        return self._deep_ep.ElasticBuffer(
            self._group,
            num_max_tokens_per_rank=num_tokens,
            hidden=hidden,
            num_topk=top_k,
            explicitly_destroy=True,
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_TH,
        probs_TK,
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
        received = exchange.dispatch(rows, topk_ids_TK, probs_TK.contiguous(), num_experts)
        out.append(received)
        ctx.exchange = exchange
        ctx.handle = received.handle
        x_RH = received.x_RH
        if isinstance(x_RH, tuple):
            x_RH = dequantize_rows(*x_RH, x_TH.dtype)
        return x_RH, received.probs_RK

    @staticmethod
    def backward(ctx, grad_x_RH: torch.Tensor, grad_probs_RK: torch.Tensor):
        x_TH, probs_TK = ctx.exchange.combine(
            grad_x_RH.contiguous(), grad_probs_RK.contiguous(), ctx.handle
        )
        return x_TH, probs_TK, None, None, None, None, None


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
    """Dispatcher that sends tokens to their experts' ranks by DeepEP.

    Each call has one host sync, within the library, for the number of tokens received.

    Args:
        num_experts: number of experts on all ranks together.
        num_ranks: ranks of the ep group; each has an equal part of the experts.
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
        self, x_TH, topk_ids_TK, probs_TK, experts: RunExperts, rows_per_expert=None
    ) -> torch.Tensor:
        """Return each token's weighted sum over its chosen experts on all ranks: [T, H].

        It ignores ``rows_per_expert``, since DeepEP exchanges sizes itself.

        Args:
            x_TH: T tokens of this rank.
            topk_ids_TK: K chosen experts; ids of ``num_experts`` or more choose none.
            probs_TK: routing weights.
            experts: function that runs this rank's experts on R rows sorted by expert: (x [T, H],
                token of each row [R], end of each expert's rows [E], weight of each row [R]) -> weight
                * expert(x) [R, H].

        Raises:
            BackendError: DeepEP cannot send tokens of this width or dtype.
        """
        _check(x_TH, topk_ids_TK, self.in_8_bits)
        topk_ids_TK = topk_ids_TK.masked_fill(topk_ids_TK >= self.num_experts, -1)
        out: list[Received] = []
        wide_TK = probs_TK.to(torch.float32)
        x_RH, probs_RK = _Dispatch.apply(
            x_TH, wide_TK, topk_ids_TK, self.num_experts, self.exchange, self.in_8_bits, out
        )
        received = out[0]
        if isinstance(received.x_RH, tuple):
            discard(x_RH, dequantize_rows, *received.x_RH, x_RH.dtype)
        local_ids_RK = received.topk_ids_RK.to(torch.int64)
        local_ids_RK = local_ids_RK.masked_fill(local_ids_RK < 0, self.num_local)
        num_rows = sum(received.counts)
        sums_RH = run_choices(x_RH, local_ids_RK, probs_RK, experts, self.num_local, num_rows)
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
