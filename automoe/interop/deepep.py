"""DeepEP v1 (``Buffer``) and v2 (``ElasticBuffer``) behind one interface, ``TokenExchange``.

The calls follow the signatures of v1.2.1 and 2.1.0 as published in their sources; this project has
not run them on a GPU. DeepEP is built from its sources: the only release on the package index does
not compile. Every name comes from ``deep_ep`` itself, since its inner modules moved between the two
versions. Calls run in the order of the current stream, unless the pass of another micro-batch
overlaps: then the stream waits for the ``EventOverlap`` that a call returns.

Shapes: T tokens of this rank, H hidden, K top-k, E experts, R distinct tokens received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from automoe.comm.collectives import ProcessGroupDispatch
from automoe.errors import BackendError, import_backend
from automoe.interop.deepep_dispatcher import DeepEPDispatcher, Received, Rows, TokenExchange
from automoe.parallel.overlap import TURNS, OverlappedDispatch

# Group sizes in v1's published tables of settings.
V1_GROUP_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
# Bytes of a number in the widest rows: gradients and results are bfloat16 if tokens are in 8 bits.
_WIDE = 2
NUM_SMS = 20  # of both versions: v2's own estimate divides by an RDMA bandwidth that may read zero
_buffers: list[Any] = []  # buffers of this process; every rank makes them in the same order


# Called with a function that makes the current stream wait for an exchange that has been started.
Finish = Callable[[Callable[[], object]], None]


def dispatcher(num_experts: int, ep: ProcessGroupDispatch) -> DeepEPDispatcher:
    """Return the dispatcher ``moe.dispatcher=deepep`` over ``ep``, of ``num_experts`` experts."""
    finish = TURNS.finish if isinstance(ep, OverlappedDispatch) else None
    return DeepEPDispatcher(num_experts, ep.num_ranks, open_deepep(ep.group, finish), ep.in_8_bits)


def open_deepep(group: dist.ProcessGroup, finish: Finish | None = None) -> TokenExchange:
    """Return the exchange over ``group`` by the installed DeepEP; its first call allocates buffers.

    Args:
        finish: decides when the current stream waits for an exchange; None: every call waits.

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


def _kept(buffer: Any) -> Any:
    """Keep ``buffer`` until ``close_deepep`` and return it.

    A buffer that has grown too small is kept too, since handles in flight refer to it.
    """
    _buffers.append(buffer)
    return buffer


def close_deepep() -> None:
    """Destroy this process's buffers, before process groups are destroyed. Collective.

    A buffer that lives until Python exits then waits for ranks that have gone, and
    ``destroy_process_group`` waits for the buffer (NVIDIA-NeMo/Automodel#2686).
    """
    while _buffers:
        _buffers.pop(0).destroy()


def hidden_size(rows: Rows) -> int:
    """Return the hidden size H of rows [T, H], or of the 8-bit codes that stand for them."""
    return (rows[0] if isinstance(rows, tuple) else rows).shape[1]


class _Calls:
    """Base of DeepEP v1 and v2: runs a call, waits for its event and returns its results."""

    _later: str  # the version's name of the option for asynchronous calls
    _options: dict[str, int] = {}  # of every call that dispatches

    def __init__(self, deep_ep: Any, group: dist.ProcessGroup, finish: Finish | None) -> None:
        self._deep_ep = deep_ep
        self._group = group
        self._finish = finish
        self._buffer: Any = None

    def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call ``function``, wait for its event and return its other results."""
        if self._finish is None:
            return function(*args, **named)[:-1]
        *results, event = function(*args, **named, **{self._later: True})
        self._finish(event.current_stream_wait)
        return results

    def combine(self, rows_RH, weights_RK, handle: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        buffer, layout = handle
        return self._call(buffer.combine, rows_RH, layout, topk_weights=weights_RK)

    def dispatch_again(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        buffer, layout = handle
        return self._call(buffer.dispatch, x_TH, handle=layout, **self._options)[0]


class BufferExchange(_Calls):
    """Exchange of tokens by ``Buffer`` of DeepEP v1: NVLink within a node, RDMA between nodes."""

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
        self._row_bytes = 0

    def dispatch(self, x_TH, topk_ids_TK, weights_TK, num_experts: int) -> Received:
        buffer = self._buffer_for(_WIDE * hidden_size(x_TH))
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            topk_ids_TK, num_experts
        )
        x_RH, topk_ids_RK, weights_RK, counts, handle = self._call(
            buffer.dispatch,
            x_TH,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_ids_TK,
            topk_weights=weights_TK,
        )
        return Received(x_RH, topk_ids_RK, weights_RK, counts, (buffer, handle))

    def _buffer_for(self, row_bytes: int) -> Any:
        if row_bytes > self._row_bytes:
            buffer_class = self._deep_ep.Buffer
            buffer_class.set_num_sms(NUM_SMS)
            configs = [
                buffer_class.get_dispatch_config(self._size),
                buffer_class.get_combine_config(self._size),
            ]
            nvlink = max(c.get_nvl_buffer_size_hint(row_bytes, self._size) for c in configs)
            # A build for one node only has no RDMA hint to give, and needs no such buffer.
            rdma = (
                max(c.get_rdma_buffer_size_hint(row_bytes, self._size) for c in configs)
                if self._size > 8
                else 0
            )
            self._buffer = _kept(buffer_class(self._group, nvlink, rdma, explicitly_destroy=True))
            self._row_bytes = row_bytes
        return self._buffer


class ElasticExchange(_Calls):
    """DeepEP v2: ``ElasticBuffer``, over NCCL's device interface."""

    _later = "async_with_compute_stream"
    _options = {"num_sms": NUM_SMS}
    _sizes = (0, 0, 0)

    def dispatch(self, x_TH, topk_ids_TK, weights_TK, num_experts: int) -> Received:
        sizes = topk_ids_TK.shape[0], hidden_size(x_TH), topk_ids_TK.shape[1]
        buffer = self._buffer_for(sizes, topk_ids_TK.device)
        x_RH, topk_ids_RK, weights_RK, handle = self._call(
            buffer.dispatch,
            x_TH,
            topk_idx=topk_ids_TK.to(self._deep_ep.topk_idx_t),
            topk_weights=weights_TK,
            num_experts=num_experts,
            do_cpu_sync=True,
            do_expand=False,
            **self._options,
        )
        return Received(
            x_RH, topk_ids_RK, weights_RK, handle.num_recv_tokens_per_expert_list, (buffer, handle)
        )

    def _buffer_for(self, sizes: tuple[int, int, int], device: torch.device) -> Any:
        """Return a buffer with room for (T, H, K).

        All ranks of a group have the same T, so all of them grow at once.
        """
        if any(new > old for new, old in zip(sizes, self._sizes, strict=True)):
            tokens, hidden, top_k = (max(pair) for pair in zip(sizes, self._sizes, strict=True))
            # ElasticBuffer takes the group's NCCL communicator, which is null before the group's
            # first collective (DeepEP#726).
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            made = self._deep_ep.ElasticBuffer(
                self._group,
                num_max_tokens_per_rank=tokens,
                hidden=hidden,
                num_topk=top_k,
                explicitly_destroy=True,
            )
            self._buffer = _kept(made)
            self._sizes = (tokens, hidden, top_k)
        return self._buffer
