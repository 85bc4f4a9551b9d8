"""Diagnosis of a collective that does not end: which rank is missing, and where every rank is.

Torch's flight recorder (gloo and NCCL) lists the collectives that a rank has begun and not finished; a
thread of each rank reads it. The first rank whose collective is close to its timeout, or has timed
out, asks all ranks for their positions in the code. Each rank answers with a file, so it need not
communicate, and the rank that asked evaluates the answers. A collective of a save or load that
exceeds a step's timeout only causes a warning. The recorder lacks gloo's sends and receives, so the
call stack identifies those.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from automoe.config.facts import SAVES
from automoe.errors import LaunchError
from automoe.launch import run_dir as runs
from automoe.storage.sealed import read_json, replace_json

_RECORDED = "512"  # collectives that the recorder keeps, enough for some steps
_NEARLY = 0.9  # fraction of the timeout; at the timeout itself NCCL ends the process
_ANSWER_S = 10.0  # time for the other ranks to answer
# A rank inside this function of automoe waits for its peers, as in functions of torch.distributed.
_WAITS = "wait_for_ranks"
# A main thread inside this function of automoe waits for its turn beside the thread ``_BACKWARD``,
# which runs the backward pass that is merged with the main thread's pass.
_GIVES_WAY = "wait_for_turn"
_BACKWARD = "merged_backward"
NOWHERE = "the interpreter"  # place of a thread that is in no code but libraries
_PACKAGE = f"{Path(__file__).parents[1]}/"
_NOT_A_PLACE = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")


@dataclass
class Pending:
    """Collective that a rank has entered and not left, read from torch's flight recorder.

    Attributes:
        op: its name, such as ``all_reduce``.
        number: its sequence number in the process group ``group``.
        ranks: global ranks of the group.
        seconds: time since it was first seen, soon after it began.
        timeout_s: timeout of the group; larger for a group that waits for slow disks.
    """

    op: str
    number: int
    group: str
    ranks: list[int]
    seconds: float
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.op} {self.number} of group {self.group} ({_ranks(self.ranks)})"


@dataclass
class Standing:
    """Position of a rank: its main thread's place in the code, and its unfinished collectives.

    Attributes:
        rank: the rank's number.
        place: place of the main thread in the code: ``module of the model: file:line in function``.
        communicates: True if the main thread is in a function of torch.distributed, or was there
            until the timeout.
        pending: unfinished collectives, oldest first.
        asked: id of the request for positions that this object answers (mtime in ns of its file).
        saving: place of the thread that saves in the background; None without such a thread.
    """

    rank: int
    place: str
    communicates: bool
    pending: list[Pending] = field(default_factory=list)
    asked: int | None = None
    saving: str | None = None

    def of_thread(self, saves: bool) -> Standing:
        """Return a copy with the place in the code and the unfinished collectives of one thread only.

        It is the thread that saves in the background if ``saves``, else the main thread. If no
        thread saves, return this object.
        """
        if self.saving is None:
            return self
        pending = [call for call in self.pending if (call.group == SAVES) == saves]
        main = replace(self, pending=pending)
        return replace(main, place=self.saving, communicates=False) if saves else main

    @property
    def waits_in(self) -> str | None:
        """Text that names the collective in which the rank waits, or ``a send or receive``; None: it does not wait."""
        if self.pending:
            return str(self.pending[0])
        return "a send or receive" if self.communicates else None


@dataclass
class StuckWatch:
    """Watch over one rank's collectives; create the watch before torch is imported.

    It finds collectives that do not end, and reports which rank is missing. A thread calls ``look``
    repeatedly, and the main thread calls ``explain`` after an error.

    Attributes:
        run_dir: run directory, which all ranks can read and write.
        terminal: text stream that shows warnings; it must not raise ``OSError``.
        tells_errors: True to print the error too, under torchrun and srun; automoe's launcher does
            so itself.
        timeout_s: timeout of a step's collectives; None until the configuration is read.
        device: this rank's torch.device, once it has one.
    """

    run_dir: Path
    rank: int
    num_ranks: int
    terminal: Any
    tells_errors: bool = False
    timeout_s: float | None = None
    device: Any = None
    _next_look: float = 0.0
    _first_seen: dict[tuple[str, int], float] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)  # slow collectives that a warning has named
    # Collectives at the last look; the recorder drops one soon after its timeout.
    _lately: list[Pending] = field(default_factory=list)
    _error: BaseException | None = None  # error that ended the main thread's work
    # The watching thread and a failing main thread may both answer.
    _answer: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)  # switches the recorder on

    def look(self) -> None:
        """Write this rank's position in the code to a file if another rank asks for it.

        Otherwise, if a collective of this rank is near its timeout, ask all ranks for theirs, wait
        up to 10 s for the answers, and record the missing rank as the run's first error. If the
        collective's group has a longer timeout than a step (``timeout_s``), and the collective has
        waited almost as long as a step's timeout, print a warning instead.
        """
        if self.device is not None and self.device.type == "cuda":
            # A new thread uses the node's first GPU, where NCCL's recorder would create a context
            # for every rank.
            sys.modules["torch"].cuda.set_device(self.device)
        if self._asked() is not None:
            self._say_where()
        elif self.timeout_s and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + min(15.0, self.timeout_s / 40)
            self._lately = pending = pending_collectives(self._first_seen)
            late = [call for call in pending if call.seconds >= _NEARLY * call.timeout_s]
            slow = [call for call in pending if call.seconds >= _NEARLY * self.timeout_s]
            unnamed = [call for call in slow if str(call) not in self._named]
            if (late or unnamed) and self._ask():
                call = (late or unnamed)[0]
                rank, message = self._find_missing(call.seconds, call.group == SAVES)
                if late:
                    self._report(rank, message)
                else:
                    self._warn(call, message)

    def explain(self, error: BaseException) -> None:
        """Record the missing rank as the run's first error if ``error`` is a collective's timeout.

        If a rank is already asking all ranks for their positions, wait up to 20 s for the outcome.
        """
        self._error = error
        if self._asked() is None and _is_timeout(error) and self.timeout_s and self._ask():
            # The message has the group's timeout, which may be larger than that of a step.
            stated = re.search(r"(\d+) ?ms", str(error))
            self._report(*self._find_missing(int(stated[1]) / 1000 if stated else self.timeout_s))
        deadline = time.monotonic() + 2 * _ANSWER_S
        outcome = self.run_dir / runs.ERROR_FILE
        while self._asked() is not None and not outcome.exists() and time.monotonic() < deadline:
            time.sleep(0.1)  # a rank is asking, so this rank's error is a consequence

    def _asked(self) -> int | None:
        """Return the id of a request for all ranks' positions in the code; None if no rank asks.

        The id is the mtime in ns of the request's file.
        """
        try:
            return (self.run_dir / runs.STUCK_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _ask(self) -> bool:
        """Ask all ranks for their positions in the code, without waiting for their answers.

        The request is the file ``STUCK_FILE`` in the run directory. Return False if it exists
        already, because another rank has asked.
        """
        try:
            (self.run_dir / runs.STUCK_FILE).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _say_where(self) -> None:
        target = self.run_dir / runs.LOG_FOLDER / f"rank{self.rank}.stuck.json"
        with self._answer:
            asked = self._asked()
            if self.rank in self._standings(asked):
                return
            # After an error the main thread is in ``explain``; the traceback has its position.
            frames = _live_frames(_working_thread())
            pending = pending_collectives(self._first_seen)
            timed_out = _is_timeout(self._error)
            if self._error is not None:
                frames = [frame for frame, _ in traceback.walk_tb(self._error.__traceback__)]
            if timed_out and not pending:
                pending = [call for call in self._lately if call.seconds >= call.timeout_s / 2]
            place, communicates = describe_place(frames)
            standing = Standing(self.rank, place, communicates or timed_out, pending, asked)
            for thread in threading.enumerate():
                if thread.name.startswith("save_"):  # ``CheckpointStore`` names its threads so
                    place, _ = describe_place(_live_frames(thread))
                    if place != NOWHERE:  # a saving thread that waits for work is nowhere
                        standing.saving = place
            target.parent.mkdir(exist_ok=True)
            if "torch.distributed" in sys.modules:
                from automoe.interop.torch_private import flight_records

                for name, record in flight_records(False):
                    target.with_name(f"{name}_{self.rank}").write_bytes(record)
            replace_json(target, asdict(standing))

    def _find_missing(self, waited_s: float, saves: bool = False) -> tuple[int, str]:
        self._say_where()
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and len(self._standings(self._asked())) < self.num_ranks:
            time.sleep(0.1)
        answers = self._standings(self._asked())
        standings = {rank: standing.of_thread(saves) for rank, standing in answers.items()}
        return who_is_missing(standings, self.num_ranks, self.rank, waited_s)

    def _warn(self, slow: Pending, message: str) -> None:
        """Warn once about a collective of a save or load, which may take longer than a step's.

        The request to all ranks to report their positions is withdrawn.

        Args:
            slow: the collective.
            message: sentences that say which rank is missing.
        """
        self._named.add(str(slow))
        for stream in (self.terminal, sys.stderr):
            print(f"warning: {message} It may take up to {slow.timeout_s:.0f} s", file=stream)
        (self.run_dir / runs.STUCK_FILE).unlink(missing_ok=True)

    def _report(self, rank: int, message: str) -> None:
        message += (
            " logs/rank*.stuck.json says where every rank was, and logs/flight_* has its last "
            "collectives, as torch records them; raise launch.timeout_s, or launch.init_timeout_s before and after the "
            "steps, if one was only slow"
        )
        failure = runs.error_report(LaunchError(message), rank)
        if runs.record_failure(self.run_dir, failure) and self.tells_errors:
            print(f"error: {runs.describe_error(failure)}", file=self.terminal)

    def _standings(self, asked: int | None) -> dict[int, Standing]:
        standings = {}
        for path in (self.run_dir / runs.LOG_FOLDER).glob("rank*.stuck.json"):
            facts = read_json(path)
            if facts["asked"] == asked:
                pending = [Pending(**call) for call in facts.pop("pending")]
                standings[facts["rank"]] = Standing(**facts, pending=pending)
        return standings


def who_is_missing(
    standings: Mapping[int, Standing], num_ranks: int, asking: int, waited_s: float
) -> tuple[int, str]:
    """Return the rank to blame, and the sentences that say why.

    It is the first rank that does not answer or waits in no collective, ranks of the collective's
    process group before others; if all wait, it is ``asking``.

    Args:
        standings: positions of the ranks that answered.
        num_ranks: number of all ranks.
        asking: rank whose collective is near its timeout.
        waited_s: seconds that the rank ``asking`` has waited.
    """
    mine = standings[asking]
    waits_in = mine.waits_in or "a send or receive"
    concerned = mine.pending[0].ranks if mine.pending else range(num_ranks)
    waiting: dict[str, list[Standing]] = {waits_in: []}  # by operation, that of ``asking`` first
    missing = []
    for rank in sorted(range(num_ranks), key=lambda rank: rank not in concerned):
        standing = standings.get(rank)
        if standing is not None and standing.waits_in is not None:
            waiting.setdefault(standing.waits_in, []).append(standing)
        elif rank != asking:
            where = f"it is at {standing.place}" if standing else "it does not answer at all"
            missing.append((rank, where))
    phrases = [
        f"In {'it' if call == waits_in else call}: {_ranks([standing.rank for standing in members])}, "
        f"at {members[0].place}."
        for call, members in waiting.items()
        if members
    ]
    if not missing:
        first = asking
        told = (
            f"{waits_in} did not end in {waited_s:.0f} s (launch.timeout_s), and no rank is outside of a collective: "
            "they wait for one another, or for a link that is gone."
        )
    else:
        (first, where), *others = missing[:8]
        verb = "join" if first in concerned else "get to the point where others wait for it, in"
        told = f"rank {first} did not {verb} {waits_in} in {waited_s:.0f} s: {where}."
        phrases[:0] = [f"Neither did rank {rank}: {where}." for rank, where in others]
    return first, " ".join([told, *phrases])


def pending_collectives(first_seen: dict[tuple[str, int], float]) -> list[Pending]:
    """Return the collectives that this process has begun and not ended, oldest first.

    Args:
        first_seen: (flight recorder, record id) of a collective -> monotonic time in s at which it
            was first found pending. The caller keeps the dictionary between calls, and this
            function updates it. The recorder has only wall clock times, which may jump.
    """
    if "torch.distributed" not in sys.modules:  # no collective begins before torch is imported
        return []
    import torch.distributed as dist

    if not dist.is_initialized():
        return []
    from automoe.interop.torch_private import flight_records, group_members

    ranks = group_members()
    calls = {}
    now = time.monotonic()
    for dump, record in flight_records(True):
        for entry in pickle.loads(record).get("entries", []):
            if entry["retired"] or entry["state"] == "completed":
                continue
            name, description = entry["process_group"]
            key = dump, entry["record_id"]
            calls[key] = Pending(
                op=entry["profiling_name"].split(":")[-1],
                number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
                group="world" if description == "default_pg" else description.removeprefix("mesh_"),
                ranks=ranks.get(name, []),
                seconds=now - first_seen.setdefault(key, now),
                timeout_s=entry["timeout_ms"] / 1000,
            )
    for key in first_seen.keys() - calls.keys():
        first_seen.pop(key, None)
    return [calls[key] for key in sorted(calls, key=lambda key: (-calls[key].seconds, key))]


def describe_place(frames: Iterable[FrameType]) -> tuple[str, bool]:
    """Return where a call stack is in the user's or automoe's code, and if it communicates there.

    Args:
        frames: a call stack, outermost frame first.

    Returns:
        Text ``module of the model: file:line in function`` for the innermost frame outside Python
        and installed libraries (``the interpreter`` if there is none); and True if that frame waits
        for ranks, or torch.distributed is at work below it.
    """
    place = NOWHERE
    communicates = False
    modules = []
    for frame in frames:
        path = frame.f_code.co_filename
        self = frame.f_locals.get("self")
        if hasattr(self, "named_modules"):
            modules.append(self)
        inside = path.replace(_PACKAGE, "automoe/")  # shorter for a file of the package
        if inside != path or not any(part in path for part in _NOT_A_PLACE):
            place = f"{inside}:{frame.f_lineno} in {frame.f_code.co_name}"
            communicates = frame.f_code.co_name == _WAITS
        elif "torch/distributed/" in path:
            communicates = True
    if modules:
        names = {id(module): name for name, module in modules[0].named_modules()}
        if around := [names[id(module)] for module in modules if names.get(id(module))]:
            place = f"{around[-1]}: {place}"
    return place, communicates


def _working_thread() -> threading.Thread:
    """Return the thread that does this rank's work: the main thread, or that of a backward pass.

    With ``parallel.overlap_all_to_all`` one micro-batch's backward pass runs in a second thread, for
    which the main thread waits at times.
    """
    main = threading.main_thread()
    if any(frame.f_code.co_name == _GIVES_WAY for frame in _live_frames(main)):
        for thread in threading.enumerate():
            if thread.name == _BACKWARD:
                return thread
    return main


def _live_frames(thread: threading.Thread) -> list[FrameType]:
    """Return the call stack of a thread, outermost frame first; empty if it has just ended."""
    innermost = sys._current_frames().get(thread.ident or 0)
    return [frame for frame, _ in traceback.walk_stack(innermost)][::-1] if innermost else []


def _is_timeout(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and bool(re.search("(?i)timed out|timeout", str(error)))


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
