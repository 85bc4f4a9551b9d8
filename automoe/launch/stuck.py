"""A collective that does not come to its end: which rank stayed away, and where every rank is.

Torch's flight recorder (gloo and NCCL) knows which collectives this rank has begun and not
finished. A thread of every rank looks at it; the first to see one that is nearly its timeout old,
or to have one time out, asks all ranks where they are. Each answers with a file, so a rank need not
be able to communicate to take part, and the one that asked puts the answers together. A collective
that may take longer than those of a step, in a save or a load, is only named when it has taken as
long; the run goes on. Sends and receives of gloo are not in the recorder: of those the call stack
tells.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from automoe.launch import run_dir as runs

_RECORDED = "512"  # collectives that the recorder remembers: some steps' worth
_NEARLY = 0.9  # of the timeout: before the backend gives up, which NCCL does by ending the process
_ANSWER_S = 10.0  # for the other ranks to say where they are
# a function of this project that is in torch.distributed as those of torch are
_WAITS = "wait_for_ranks"
_SAVES = "checkpoint"  # the group over which saves and loads talk
_PACKAGE = Path(__file__).parents[1]
_NOT_A_PLACE = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")


@dataclass
class Pending:
    """A collective that a rank has entered and not left. ``number`` counts those of the group."""

    op: str
    number: int
    group: str
    ranks: list[int]
    seconds: float  # since it was first seen, soon after it began
    timeout_s: float  # of the group: one that waits for slow disks has more than those of a step

    def __str__(self) -> str:
        return f"{self.op} {self.number} of group {self.group} ({_ranks(self.ranks)})"


@dataclass
class Standing:
    """Where a rank is: its unfinished collectives, oldest first, and its main thread's place in the
    code.

    ``saving`` is the place of the thread that saves in the background, where there is one.
    """

    rank: int
    place: str
    # its main thread is in a function of torch.distributed, or was until that had no more time
    communicates: bool
    pending: list[Pending] = field(default_factory=list)
    asked: int | None = None  # which question this answers
    saving: str | None = None

    def of_thread(self, saves: bool) -> Standing:
        """What concerns one of the two threads alone: the one that saves, or the main one."""
        if self.saving is None:
            return self
        pending = [one for one in self.pending if (one.group == _SAVES) == saves]
        main = replace(self, pending=pending)
        return replace(main, place=self.saving, communicates=False) if saves else main

    @property
    def waits_in(self) -> str | None:
        """What it waits in; None: it does not wait."""
        if self.pending:
            return str(self.pending[0])
        return "a send or receive" if self.communicates else None


class StuckWatch:
    """One rank's part: ``look`` once a second, ``explain`` when a collective has failed. Made
    before torch is imported.

    Args:
        run_dir: seen by all ranks.
        terminal: where to name what is slow.
    """

    def __init__(self, run_dir: Path, rank: int, num_ranks: int, terminal: TextIO) -> None:
        self.run_dir, self.rank, self.num_ranks, self.terminal = run_dir, rank, num_ranks, terminal
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)  # switches the recorder on
        self.tells_errors = False  # under torchrun and srun, where no launcher of ours does
        self.timeout_s: float | None = None  # known once the configuration is read
        self.device: Any = None  # of this rank, once it has one
        self._next_look = 0.0
        self._first_seen: dict[tuple[str, int], float] = {}
        self._named: set[str] = set()
        # at the last look: the recorder drops one soon after it has run out of time
        self._lately: list[Pending] = []
        self._error: BaseException | None = None  # what has ended the main thread's work
        # the watching thread and a failing main thread may both answer
        self._answer = threading.Lock()

    def look(self) -> None:
        """Answer where another rank has asked; ask where a collective of this rank is nearly out of
        time."""
        if self.device is not None and self.device.type == "cuda":
            # A thread begins on the node's first GPU, where NCCL's recorder would make a context
            # for every rank.
            sys.modules["torch"].cuda.set_device(self.device)
        if self._asked() is not None:
            self._say_where()
        elif self.timeout_s is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + min(15.0, self.timeout_s / 40)
            self._lately = pending = pending_collectives(self._first_seen)
            late = [one for one in pending if one.seconds >= _NEARLY * one.timeout_s]
            slow = [
                one
                for one in pending
                if one.seconds >= _NEARLY * self.timeout_s and str(one) not in self._named
            ]
            if (late or slow) and self._ask():
                one = (late or slow)[0]
                rank, message = self._find_missing(one.seconds, one.group == _SAVES)
                if late:
                    self._report(rank, message)
                else:
                    self._name(str(one), f"{message} It may take up to {one.timeout_s:.0f} s")

    def explain(self, error: BaseException) -> None:
        """If ``error`` is a collective's timeout, see that the outcome on record says who did not
        join it."""
        self._error = error
        if (
            self._asked() is None
            and _is_timeout(error)
            and self.timeout_s is not None
            and self._ask()
        ):
            # of the group, which has more than those of a step at times
            stated = re.search(r"(\d+) ?ms", str(error))
            self._report(*self._find_missing(int(stated[1]) / 1000 if stated else self.timeout_s))
        deadline, outcome = time.monotonic() + 2 * _ANSWER_S, self.run_dir / runs.ERROR_FILE
        while self._asked() is not None and not outcome.exists() and time.monotonic() < deadline:
            time.sleep(0.1)  # a rank is asking around: what this one has met is a consequence

    def _asked(self) -> int | None:
        """What tells the present question from earlier ones; None: nobody asks."""
        try:
            return (self.run_dir / runs.STUCK_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _ask(self) -> bool:
        """Whether this rank is the first to ask."""
        try:
            os.close(os.open(self.run_dir / runs.STUCK_FILE, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _say_where(self) -> None:
        target = self.run_dir / runs.LOG_FOLDER / f"rank{self.rank}.stuck.json"
        with self._answer:
            asked = self._asked()
            if self.rank in self._standings(asked):
                return
            # by then the main thread is in ``explain``, and what it was at is in the traceback
            error = self._error
            frames = (
                [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
                if error
                else _live_frames()
            )
            place, communicates = describe_place(frames)
            communicates |= error is not None and _is_timeout(error)
            saving = [
                describe_place(_live_frames(thread))[0]
                for thread in threading.enumerate()
                if _saves(thread)
            ]
            pending = pending_collectives(self._first_seen)
            if not pending and error is not None and _is_timeout(error):
                pending = [one for one in self._lately if one.seconds >= one.timeout_s / 2]
            standing = Standing(
                self.rank, place, communicates, pending, asked, saving[0] if saving else None
            )
            target.parent.mkdir(exist_ok=True)
            for name, record in _records():
                target.with_name(f"{name}_{self.rank}").write_bytes(record)
            scratch = target.with_suffix(".tmp")
            scratch.write_text(json.dumps(asdict(standing), indent=1))
            scratch.rename(target)

    def _find_missing(self, waited_s: float, saves: bool = False) -> tuple[int, str]:
        self._say_where()
        deadline = time.monotonic() + _ANSWER_S
        while (
            len(standings := self._standings(self._asked())) < self.num_ranks
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        standings = {rank: standing.of_thread(saves) for rank, standing in standings.items()}
        return who_is_missing(standings, self.num_ranks, self.rank, waited_s)

    def _name(self, what: str, message: str) -> None:
        """Say what is slow, and take the question back."""
        self._named.add(what)
        for stream in (self.terminal, sys.stderr):
            with contextlib.suppress(OSError):
                print(f"warning: {message}", file=stream, flush=True)
        (self.run_dir / runs.STUCK_FILE).unlink(missing_ok=True)

    def _report(self, rank: int, message: str) -> None:
        message += (
            " Where every rank was is in logs/rank*.stuck.json, and its last collectives, as torch "
            "records them, in logs/flight_*; raise launch.timeout_s, or launch.init_timeout_s before and after the "
            "steps, if one was only slow"
        )
        failure = runs.launch_failure(rank, message)
        if runs.record_failure(self.run_dir, failure) and self.tells_errors:
            with contextlib.suppress(OSError):
                print(f"error: {runs.describe_error(failure)}", file=self.terminal, flush=True)

    def _standings(self, asked: int | None) -> dict[int, Standing]:
        found = {}
        for path in (self.run_dir / runs.LOG_FOLDER).glob("rank*.stuck.json"):
            facts = json.loads(path.read_text())
            if facts["asked"] == asked:
                pending = [Pending(**one) for one in facts.pop("pending")]
                found[facts["rank"]] = Standing(**facts, pending=pending)
        return found


def who_is_missing(
    standings: Mapping[int, Standing], num_ranks: int, asking: int, waited_s: float
) -> tuple[int, str]:
    """The rank to blame and the sentences that say why.

    Args:
        standings: of the ranks that answered.
        asking: the rank whose collective is out of time.
    """
    mine = standings[asking]
    what = mine.waits_in or "a send or receive"
    silent = [rank for rank in range(num_ranks) if rank not in standings]
    elsewhere = [
        rank for rank, standing in standings.items() if standing.waits_in is None and rank != asking
    ]
    concerned = set(mine.pending[0].ranks) if mine.pending else set(range(num_ranks))
    missing = sorted(silent + elsewhere, key=lambda rank: (rank not in concerned, rank))
    waiting = "; ".join(_who_waits_where(standings, what))
    if not missing:
        return asking, (
            f"{what} did not end in {waited_s:.0f} s (launch.timeout_s), and no rank is outside of a collective: "
            f"they wait for one another, or for a link that is gone. {waiting}."
        )
    first = missing[0]
    verb = "join" if first in concerned else "get to the point where others wait for it, in"
    where = "it does not answer at all" if first in silent else f"it is at {standings[first].place}"
    others = "".join(
        f" Neither did rank {rank}, "
        + ("which does not answer." if rank in silent else f"at {standings[rank].place}.")
        for rank in missing[1:8]
    )
    return (
        first,
        f"rank {first} did not {verb} {what} in {waited_s:.0f} s: {where}.{others} {waiting}.",
    )


def _who_waits_where(standings: Mapping[int, Standing], first: str) -> list[str]:
    """One phrase for each thing waited for, that of the asking rank first."""
    groups: dict[str, list[Standing]] = {}
    for standing in standings.values():
        if (what := standing.waits_in) is not None:
            groups.setdefault(what, []).append(standing)
    phrases = []
    for what in sorted(groups, key=lambda what: what != first):
        waiting = groups[what]
        name = _ranks([standing.rank for standing in waiting]).capitalize()
        verb = "wait" if len(waiting) > 1 else "waits"
        phrases.append(f"{name} {verb} in {'it' if what == first else what}, at {waiting[0].place}")
    return phrases


def pending_collectives(first_seen: dict[tuple[str, int], float]) -> list[Pending]:
    """Collectives of this process that have begun and not ended, the oldest first.

    Args:
        first_seen: when each of them was first pending here, on the monotonic clock; kept by the
            caller from call to call and brought up to date. The recorder has times of the wall
            clock alone, which may jump.
    """
    if "torch.distributed" not in sys.modules:  # nothing has begun before torch is there
        return []
    import torch.distributed as dist

    if not dist.is_initialized():
        return []
    from automoe.interop.torch_private import flight_records, group_members

    ranks = group_members()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for dump, record in flight_records(True):
        for entry in pickle.loads(record).get("entries", []):
            if not entry["retired"] and entry["state"] != "completed":
                found[dump, entry["record_id"]] = entry
    now = time.monotonic()
    for key in first_seen.keys() - found.keys():
        first_seen.pop(key, None)
    ages = {key: now - first_seen.setdefault(key, now) for key in found}
    pending = []
    for key in sorted(found, key=lambda key: (-ages[key], key)):
        entry = found[key]
        name, description = entry["process_group"]
        one = Pending(
            op=entry["profiling_name"].split(":")[-1],
            number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            group="world" if description == "default_pg" else description.removeprefix("mesh_"),
            ranks=ranks.get(name, []),
            seconds=ages[key],
            timeout_s=entry["timeout_ms"] / 1000,
        )
        pending.append(one)
    return pending


def _records() -> Iterator[tuple[str, bytes]]:
    """Yield (name, pickled record) of the flight recorders; nothing before torch.distributed is
    imported."""
    if "torch.distributed" in sys.modules:
        from automoe.interop.torch_private import flight_records

        yield from flight_records(False)


def describe_place(frames: Iterable[FrameType]) -> tuple[str, bool]:
    """``module of the model: file:line in function``, and whether torch.distributed is at work
    there.

    Args:
        frames: a call stack, outermost first. The place is the innermost that belongs to neither
            Python nor an installed library.
    """
    place, communicates, modules = "the interpreter", False, []
    for frame in frames:
        path = frame.f_code.co_filename
        self = frame.f_locals.get("self")
        if hasattr(self, "named_modules"):
            modules.append(self)
        if path.startswith(str(_PACKAGE)) or not any(part in path for part in _NOT_A_PLACE):
            shown = (
                os.path.relpath(path, _PACKAGE.parent) if path.startswith(str(_PACKAGE)) else path
            )
            place, communicates = (
                f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}",
                frame.f_code.co_name == _WAITS,
            )
        elif "torch/distributed/" in path:
            communicates = True
    if modules:
        names = {id(module): name for name, module in modules[0].named_modules()}
        inside = [names[id(module)] for module in modules if names.get(id(module))]
        if inside:
            place = f"{inside[-1]}: {place}"
    return place, communicates


def _live_frames(thread: threading.Thread | None = None) -> list[FrameType]:
    """The call stack of a thread, by default the main one, outermost first; empty if it has just
    ended."""
    innermost = sys._current_frames().get((thread or threading.main_thread()).ident or 0)
    return [frame for frame, _ in traceback.walk_stack(innermost)][::-1] if innermost else []


def _saves(thread: threading.Thread) -> bool:
    return thread.name.startswith("save_")  # of ``CheckpointStore.begin``


def _is_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
