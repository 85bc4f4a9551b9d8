"""Softmax attention of ``attention.c`` as an operation of torch: ``kernels.attention=c``, float32 on the CPU.

Letters: B rows, S positions of queries, R of keys, N query heads, G key and value heads, D head dim, E that of values.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from automoe.errors import BackendError
from automoe.kernels.c_library import ATTENTION, load_library


class _Attention(ctypes.Structure):
    """``Attention`` of ``attention.c``."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("B", "S", "R", "N", "G", "D", "E")),
        *((f"{x}_{stride}", ctypes.c_long) for x in "qkv" for stride in ("row", "position", "head")),
        ("mask_row", ctypes.c_long),
        ("mask_position", ctypes.c_long),
        ("scale", ctypes.c_float),
    ]


@cache
def compiled_functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """Forward and backward: the structure, then addresses of tensors, then the range of tasks.

    Raises:
        BackendError: as ``load_library``.
    """
    library = load_library(ATTENTION)
    for function, num_tensors in ((library.attention_forward, 6), (library.attention_backward, 10)):
        function.argtypes = [ctypes.POINTER(_Attention), *[ctypes.c_void_p] * num_tensors, *[ctypes.c_long] * 2]
        function.restype = ctypes.c_int
    return library.attention_forward, library.attention_backward


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="attention")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its parent's threads


def _run(
    function: Callable[..., int],
    tasks: int,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    scale: float,
    rest: list[torch.Tensor],
) -> None:
    """Every task, shared out among as many threads as torch has; a call of C leaves the interpreter to the others."""
    q_BSND, k_BRGD, v_BRGE = qkv = [x if x.stride(-1) == 1 else x.contiguous() for x in qkv]
    (B, S, N, D), (R, G), E = q_BSND.shape, k_BRGD.shape[1:3], v_BRGE.shape[3]
    strides = [stride for x in qkv for stride in x.stride()[:3]]
    mask_strides = 0, 0
    if mask is not None:
        mask = mask.expand(B, 1, S, R)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask_strides = mask.stride(0), mask.stride(2)
    described = _Attention(B, S, R, N, G, D, E, *strides, *mask_strides, scale)
    addresses = [None if x is None else x.data_ptr() for x in (*qkv, mask, *rest)]
    threads = torch.get_num_threads()
    count = min(threads, tasks)
    bounds = [tasks * i // count for i in range(count + 1)] if count else []

    def run(first: int, last: int) -> int:
        return function(ctypes.byref(described), *addresses, first, last)

    done = map(run, bounds, bounds[1:]) if count <= 1 else _threads(threads).map(run, bounds, bounds[1:])
    if not all(list(done)):  # all of them: no thread may outlive the tensors
        raise MemoryError(
            f"{ATTENTION.setting}: no memory for the keys and values of a head, {R} positions, on each of {count} "
            "threads. Lower train.seq_len or launch.threads_per_rank"
        )


@torch.library.custom_op("automoe::c_attention", mutates_args=())
def _forward(
    q_BSND: torch.Tensor, k_BRGD: torch.Tensor, v_BRGE: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, S, N, E] and, for the backward pass, each query's log of the sum of exp(score) [B, N, S]."""
    B, S, N, _ = q_BSND.shape
    out_BSNE, log_sum_BNS = q_BSND.new_empty(B, S, N, v_BRGE.shape[3]), q_BSND.new_empty(B, N, S)
    _run(compiled_functions()[0], B * N, (q_BSND, k_BRGD, v_BRGE), mask, scale, [out_BSNE, log_sum_BNS])
    return out_BSNE, log_sum_BNS


@_forward.register_fake
def _(q_BSND, k_BRGD, v_BRGE, mask, scale):
    B, S, N, _ = q_BSND.shape
    return q_BSND.new_empty(B, S, N, v_BRGE.shape[3]), q_BSND.new_empty(B, N, S)


@torch.library.custom_op("automoe::c_attention_backward", mutates_args=())
def _backward(
    q_BSND: torch.Tensor,
    k_BRGD: torch.Tensor,
    v_BRGE: torch.Tensor,
    mask: torch.Tensor | None,
    out_BSNE: torch.Tensor,
    log_sum_BNS: torch.Tensor,
    grad_BSNE: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    qkv = q_BSND, k_BRGD, v_BRGE
    grads = q_BSND.new_empty(q_BSND.shape), k_BRGD.new_empty(k_BRGD.shape), v_BRGE.new_empty(v_BRGE.shape)
    given = [x.contiguous() for x in (out_BSNE, log_sum_BNS, grad_BSNE)]
    _run(compiled_functions()[1], k_BRGD.shape[0] * k_BRGD.shape[2], qkv, mask, scale, [*given, *grads])
    return grads


@_backward.register_fake
def _(q_BSND, k_BRGD, v_BRGE, mask, out_BSNE, log_sum_BNS, grad_BSNE, scale):
    return tuple(x.new_empty(x.shape) for x in (q_BSND, k_BRGD, v_BRGE))


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, grad_BSNE: torch.Tensor, _: torch.Tensor | None):
    return *_backward(*ctx.saved_tensors, grad_BSNE, ctx.scale), None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def c_attention(
    q_BSND: torch.Tensor, k_BRGD: torch.Tensor, v_BRGE: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """softmax(scale q k^T) v, [B, S, N, E]; G divides N.

    Args:
        mask: bool [B, 1, S, R], true where a query may look; None: a query sees the keys up to its own position. One
            that sees none gets zeros.

    Raises:
        BackendError: a tensor is not float32 on the CPU, or as ``load_library``.
        MemoryError: there is no memory for the keys and values of a head.
    """
    # C reads by address: what does not fit would be other memory.
    assert q_BSND.shape[0] == k_BRGD.shape[0] and q_BSND.shape[3] == k_BRGD.shape[3], (q_BSND.shape, k_BRGD.shape)
    assert k_BRGD.shape[:3] == v_BRGE.shape[:3] and q_BSND.shape[2] % k_BRGD.shape[2] == 0, (k_BRGD.shape, v_BRGE.shape)
    assert mask is None or (mask.dtype == torch.bool and mask.device.type == "cpu"), mask.dtype
    for x in (q_BSND, k_BRGD, v_BRGE):
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise BackendError(
                f"{ATTENTION.setting} computes in float32 on the CPU, and got {x.dtype} on {x.device}. "
                f"Set {ATTENTION.instead}"
            )
    return _forward(q_BSND, k_BRGD, v_BRGE, mask, scale)[0]
