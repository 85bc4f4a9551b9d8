"""Faults on demand: named points of a run where a rank can be made to die, raise, sleep or find the disk full.

The product knows nothing of them. A point is the begin or the end of one of its phases (``automoe.passes.trace``), to which
``faults`` listens, or the middle of a file that it wraps. ``faulty_pretrain.py`` is the shipped recipe with them:

    AUTOMOE_FAULT=kill:rank=1:at=shard_written:step=4 python -m automoe.train recipe=tests/support/faulty_pretrain.py

Fields are separated by colons, several faults by semicolons. The first field is the kind:

    kill    SIGKILL to this process: no handler, no clean-up, as if the machine were gone
    raise   ``InjectedFault``
    sleep   ``seconds`` of sleep (default: an hour)
    hold    wait until the file ``until`` exists
    enospc, eio, estale  the ``OSError`` of a disk that is full, or fails, where a test cannot have a real one

``at`` names the point; the other fields narrow it: ``rank`` (a number, or ``all``, the default), ``step``
(default: any), ``hit`` (fire at the n-th time that this process gets there; default 1 and every later one) and
``once``, a file that is made before the fault fires and keeps it from firing again, so that a restarted run gets past
it (one file for each rank: ``once=PATH`` makes ``PATH.rankN``).
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from automoe.errors import ConfigError
from automoe.passes.trace import listening

VARIABLE = "AUTOMOE_FAULT"

ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "estale": errno.ESTALE}
KINDS = ("kill", "raise", "sleep", "hold", *ERRORS)
FIELDS = ("at", "rank", "step", "hit", "seconds", "until", "once")

# Point -> where in the code it is. The step of a point inside a step is the number of that step, of a point inside
# a save the number of the step saved.
POINTS = {
    "started": "the recipe begins; no step",
    "resuming": "a checkpoint was chosen and verified, nothing of it is loaded; step: the checkpoint's",
    "resumed": "the state is loaded, the first step not begun; step: the checkpoint's",
    "step_begin": "before a step reads its batch",
    "forward": "the batch is read, before the first forward",
    "before_collective": "forward and backward are done, before the step's sums over ranks",
    "step_end": "weights are updated, before the step is recorded",
    "recorded": "the step's metrics are written, before a save",
    "save_begin": "before a save touches the disk",
    "shard_write": "in the middle of this rank's shard",
    "shard_written": "this rank's shard is complete and flushed",
    "manifest_written": "the manifest is flushed, before the rename commits the step",
    "renamed": "the step is committed, before LATEST names it",
    "latest_written": "LATEST names the step, before retention deletes older ones",
    "save_end": "older steps are deleted, the save is over",
}


# (phase, edge) -> the point there.
AT_PHASES = {
    ("load", "begin"): "resuming",
    ("load", "end"): "resumed",
    ("step", "begin"): "step_begin",
    ("forward_backward", "begin"): "forward",
    ("forward_backward", "end"): "before_collective",
    ("optimizer_step", "end"): "step_end",
    ("record", "end"): "recorded",
    ("save", "begin"): "save_begin",
    ("write_shard", "end"): "shard_written",
    ("write_manifest", "end"): "manifest_written",
    ("commit", "end"): "renamed",
    ("write_latest", "end"): "latest_written",
    ("save", "end"): "save_end",
}
# Points of a save at which all ranks hear of an error on one of them, as of an error of the save itself.
SHARED = ("save_begin", "manifest_written", "renamed", "latest_written", "save_end")


class InjectedFault(RuntimeError):
    """What the kind ``raise`` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault of ``AUTOMOE_FAULT``; None: any."""

    kind: str
    at: str
    rank: int | None = None
    step: int | None = None
    hit: int | None = None
    seconds: float = 3600.0
    until: str | None = None
    once: str | None = None


def fault_point(name: str, step: int | None = None) -> None:
    """Say that this rank is at point ``name`` in ``step``; a fault that ``AUTOMOE_FAULT`` asks for happens here.

    Raises:
        ConfigError: ``AUTOMOE_FAULT`` cannot be understood.
        InjectedFault, OSError: the fault itself.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    assert name in POINTS, f"{name} is not in fault_points.POINTS"
    faults = parse(text)
    _visits[name, step] += 1
    _visits[name, None] += step is not None
    for fault in faults:
        if fault.at == name and fault.step in (None, step) and fault.rank in (None, _rank()):
            if fault.hit in (None, _visits[name, fault.step]) and _first_time(fault):
                _happen(fault, name, step)


@contextmanager
def faults(text: str | None = None) -> Iterator[None]:
    """Put the points of ``POINTS`` into everything that runs meanwhile but ``started``, which is the recipe's.

    Args:
        text: the faults; None: what ``AUTOMOE_FAULT`` says.

    Raises:
        ConfigError: as ``fault_point``.
    """
    with ExitStack() as stack:
        if text is not None:
            stack.enter_context(mock.patch.dict(os.environ, {VARIABLE: text}))
        if not (asked_for := {fault.at for fault in parse(os.environ.get(VARIABLE, ""))}):
            yield
            return
        from automoe.checkpoint.hashed_files import HashingStream
        from automoe.checkpoint.store import CheckpointStore

        saving: Any = None  # the store of the save in progress, and its step

        def at_phase(name: str, step: int | None, edge: str) -> None:
            if (point := AT_PHASES.get((name, edge))) not in asked_for:
                return
            if point in SHARED:
                saving[0].ranks.all(lambda: fault_point(point, step))
            else:
                fault_point(point, step)

        def write(store: Any, tensors: Any, content: Any, original=CheckpointStore._write) -> Any:
            nonlocal saving
            saving = store, content["step"]
            return original(store, tensors, content)

        def open_stream(stream: Any, path: Any, original=HashingStream.__init__) -> None:
            original(stream, path)
            if path.suffix == ".distcp":
                stream._file = HalfWritten(stream._file, saving[1])

        stack.enter_context(listening(at_phase))
        stack.enter_context(mock.patch.object(CheckpointStore, "_write", write))
        stack.enter_context(mock.patch.object(HashingStream, "__init__", open_stream))
        yield


class HalfWritten:
    """A raw file whose first write stops half way, as a disk may do, and is at ``shard_write`` before it goes on."""

    def __init__(self, file: Any, step: int) -> None:
        self._file, self._step, self._writes = file, step, 0

    def write(self, view: memoryview) -> int:
        self._writes += 1
        if self._writes == 1:
            return self._file.write(view[: max(len(view) // 2, 1)])
        if self._writes == 2:
            fault_point("shard_write", self._step)
        return self._file.write(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@functools.cache
def parse(text: str) -> tuple[Fault, ...]:
    """The faults that ``text`` asks for.

    Raises:
        ConfigError: a kind, field or point that there is not, or a number that is none; lists what there is.
    """
    return tuple(_parse_one(part) for part in text.split(";") if part)


def _parse_one(text: str) -> Fault:
    kind, *fields = text.split(":")
    if kind not in KINDS:
        raise _wrong(text, f"{kind!r} is not a kind of fault", f"Kinds: {', '.join(KINDS)}")
    values: dict[str, str] = {}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals or key not in FIELDS or key in values:
            known = f"Fields: {', '.join(FIELDS)}, each once, as key=value"
            raise _wrong(text, f"{field!r} is not a field", known)
        values[key] = value
    point = values.get("at", "")
    if point not in POINTS:
        raise _wrong(text, f"at={point!r} is not a fault point", f"Points: {', '.join(POINTS)}")
    if kind == "hold" and not values.get("until"):
        raise _wrong(text, "hold waits for a file, and none is named", "Add until=PATH")
    try:
        numbers = {
            key: int(values[key])
            for key in ("rank", "step", "hit")
            if key in values and (key, values[key]) != ("rank", "all")
        }
        seconds = float(values.get("seconds", Fault.seconds))
    except ValueError as error:
        raise _wrong(text, str(error), "rank, step and hit are whole numbers, seconds a number") from None
    paths = {key: values[key] for key in ("until", "once") if key in values}
    return Fault(kind, point, seconds=seconds, **paths, **numbers)


def _wrong(text: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(VARIABLE, text, rule, remedy)


_visits: Counter[tuple[str, int | None]] = Counter()


def _first_time(fault: Fault) -> bool:
    if fault.once is None:
        return True
    try:
        os.close(os.open(f"{fault.once}.rank{_rank()}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _happen(fault: Fault, name: str, step: int | None) -> None:
    where = f"{VARIABLE}: {fault.kind} on rank {_rank()} at {name}, step {step}"
    print(where, file=sys.stderr, flush=True)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "sleep":
        time.sleep(fault.seconds)
    elif fault.kind == "hold":
        while not os.path.exists(str(fault.until)):
            time.sleep(0.01)
    elif fault.kind in ERRORS:
        raise OSError(ERRORS[fault.kind], os.strerror(ERRORS[fault.kind]), where)
    else:
        raise InjectedFault(where)


def _rank() -> int:
    """This process's rank; 0 where there is no process group."""
    torch_distributed = sys.modules.get("torch.distributed")  # a process without torch has no ranks
    if torch_distributed is not None and torch_distributed.is_initialized():
        return torch_distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
