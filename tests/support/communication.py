"""What a rank sends: every collective and point-to-point message, with the bytes that leave the rank.

Counted where torch dispatches them, so nothing that FSDP, pipelines or autograd send on their own is missed. What FSDP
sums over gloo by an all-to-all counts as the reduce-scatter that it is: as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from automoe.comm.collectives import GlooReduceScatter


@dataclass(frozen=True)
class Message:
    """One call on this rank.

    Attributes:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast`` or ``send``.
        ranks: the group, in order.
        sent: bytes that leave this rank, in the bandwidth-optimal ring form of the collective.
        dtype: of what travels.
        to: of an all-to-all, the bytes for each rank of the group.
    """

    op: str
    ranks: tuple[int, ...]
    sent: int
    dtype: torch.dtype
    to: tuple[int, ...] = ()


# Names differ between torch's functional and classic collectives, and between releases.
_KINDS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}


class CommunicationLog(TorchDispatchMode):
    """Collects ``messages`` while it is entered, on the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self._sums = False

    def __enter__(self) -> CommunicationLog:
        plain = GlooReduceScatter.__call__

        def summed(*args: Any, **kwargs: Any) -> None:
            self._sums = True
            plain(*args, **kwargs)
            self._sums = False

        self._patch = mock.patch.object(GlooReduceScatter, "__call__", summed)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if "c10d" in namespace and (op := _kind(name)) is not None:
            self.messages.append(_message("reduce_scatter" if self._sums else op, func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def sent(self, op: str, ranks: Iterable[int] | None = None, floating: bool = True) -> int:
        """Bytes sent by ``op`` (over the group ``ranks``, or any), of floating-point numbers alone by default."""
        group = None if ranks is None else tuple(ranks)
        return sum(
            m.sent
            for m in self.messages
            if m.op == op and (group is None or m.ranks == group) and m.dtype.is_floating_point == floating
        )


def _kind(name: str) -> str | None:
    if "recv" in name or "wait" in name or "barrier" in name:
        return None
    longest = sorted((key for key in _KINDS if key in name), key=len)
    return _KINDS[longest[-1]] if longest else None


def _message(op: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Message:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    group = next(g for value in given.values() if (g := _group(value)) is not None)
    ranks = tuple(dist.get_process_group_ranks(group))
    source = next(given[key] for key in ("input_tensors", "input_tensor", "input", "tensors", "self") if key in given)
    tensors = _flatten(source)
    num_bytes, dtype = sum(t.numel() * t.element_size() for t in tensors), tensors[0].dtype
    size, to = len(ranks), ()
    if op == "all_to_all":
        splits = given.get("input_split_sizes") or [1] * size
        kept = splits[dist.get_rank(group)]
        sent = num_bytes * (sum(splits) - kept) // max(sum(splits), 1)
        to = tuple(num_bytes * split // max(sum(splits), 1) for split in splits)
    elif op == "all_gather":
        sent = num_bytes * (size - 1)
    elif op == "reduce_scatter":
        sent = num_bytes * (size - 1) // size
    elif op == "all_reduce":
        sent = 2 * num_bytes * (size - 1) // size
    else:
        sent = num_bytes
    return Message(op, ranks, sent, dtype, to)


def _group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject):
        return dist.ProcessGroup.unbox(value)
    if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
        return _resolve_process_group(value)
    return None


def _flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flatten(item)]
