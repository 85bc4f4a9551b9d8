"""Faults on demand, for tests: named points in the code where a rank can be made to die, raise, sleep or run full.

A point is a call of ``reach(name, step)``. Nothing happens there unless ``AUTOMOE_FAULT`` says so:

    AUTOMOE_FAULT=kill:rank=1:at=shard_written:step=4

Fields are separated by colons, several faults by semicolons. The first field is the kind:

    kill    SIGKILL to this process: no handler, no clean-up, as if the machine were gone
    raise   ``InjectedFault``
    sleep   ``seconds`` of sleep (default: an hour)
    hold    wait until the file ``until`` exists
    enospc  the ``OSError`` of a full disk, where a test cannot have a real one

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
from dataclasses import dataclass

from automoe.errors import ConfigError

VARIABLE = "AUTOMOE_FAULT"

KINDS = ("kill", "raise", "sleep", "hold", "enospc")
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


def reach(name: str, step: int | None = None) -> None:
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


def awaited(name: str) -> bool:
    """Whether ``AUTOMOE_FAULT`` asks for a fault at point ``name``, on any rank.

    Raises:
        ConfigError: as ``reach``.
    """
    text = os.environ.get(VARIABLE)
    return bool(text) and any(fault.at == name for fault in parse(text))


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
    elif fault.kind == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)
    else:
        raise InjectedFault(where)


def _rank() -> int:
    """This process's rank; 0 where there is no process group."""
    torch_distributed = sys.modules.get("torch.distributed")  # a process without torch has no ranks
    if torch_distributed is not None and torch_distributed.is_initialized():
        return torch_distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
