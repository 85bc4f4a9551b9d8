"""Launcher of a run on this machine: it starts, watches, stops and restarts the ranks.

The ranks are forks of a server that has imported torch (``automoe.launch.fork_server``). The
launcher judges how a run ended by the run directory's status file.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from automoe.checkpoint.steps import FOLDER, committed_steps
from automoe.config.frozen import Device, resolved, save_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import LaunchError, say
from automoe.launch import run_dir as runs
from automoe.launch.external import without_rendezvous
from automoe.launch.fork_server import ForkedRank, ForkServer, Job, fork_server
from automoe.launch.hardware import check_backends, num_cores, start_notes
from automoe.launch.prepare import check_data
from automoe.launch.ranks import LOOPBACK, check_system, store_file
from automoe.launch.worker import STOP_SIGNALS, run_rank
from automoe.storage.sealed import replace_json

_LOST_PEER_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_KILL_AFTER_S = 8  # time for the other ranks to leave by themselves once one has failed


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run.

    Attributes:
        state: done, failed or preempted.
        objective: validation loss, else training loss; None if the recipe returned none.
        error: report of the first error, as in ``status.json``; None without one.
        signum: signal that ended the run early; None without one.
    """

    state: str
    objective: float | None
    error: dict[str, Any] | None
    signum: int | None = None

    @property
    def exit_code(self) -> int:
        """Exit status: 0 done, 1 failed, 128 + signal preempted (143 SIGTERM, 130 Ctrl-C).

        A preempted run whose launcher got no signal counts as SIGTERM: its ranks got it from
        someone else.
        """
        if self.state == "done":
            return 0
        return 128 + (self.signum or signal.SIGTERM) if self.state == "preempted" else 1


def train_here(
    config: Config, shape: MeshShape, device: Device, another_follows: bool = False
) -> RunResult:
    """Run a checked configuration on this machine, and print how it ended.

    With ``observe.report``, ``report.html`` is written to the run directory.

    Args:
        another_follows: keep the fork server for the next run, which then need not import torch
            again.

    Raises:
        ConfigError, DataError, LaunchError, BackendError: the run could not be started.
    """
    check_system()
    check_backends(config, shape, device)
    check_data(config)
    frozen = resolved(config, shape, device)
    another = runs.check_same_run(Path(config.run_dir).absolute(), frozen)
    for note in start_notes(config) + another:
        say(note)
    ranks = "1 rank" if shape.world_size == 1 else f"{shape.world_size} ranks"
    print(f"starting {ranks} on {device} in {config.run_dir}", flush=True)
    env = without_rendezvous(os.environ) | LOOPBACK
    share = max(1, num_cores() // shape.world_size)
    env["OMP_NUM_THREADS"] = str(
        config.launch.threads_per_rank or env.get("OMP_NUM_THREADS", share)
    )
    with fork_server(env, keep=another_follows) as server:
        from automoe.data.prepare import with_steps
        from automoe.hf.identity import complete

        complete(config)
        frozen = with_steps(frozen)  # reports a bad line or a missing file before ranks start
        result = launch_local(frozen, shape.world_size, server)
    if result.error is not None:
        error = runs.describe_error(result.error)
        say(f"error: {error}\nlogs of every rank: {config.run_dir}/logs")
        if saved := committed_steps(Path(config.run_dir) / FOLDER):
            say(f"newest checkpoint: {config.run_dir}/{FOLDER}/{saved[-1]}")
    elif result.state == "preempted":
        say("stopped before the last step, as asked")
    if config.observe.report and Path(config.run_dir).is_dir():
        # This process writes the report, not rank 0, so that a run killed by SIGKILL has one too.
        runs.show_report(config.run_dir)
    return result


def launch_local(config: Config, num_ranks: int, server: ForkServer) -> RunResult:
    """Run every rank of a configuration as a fork of ``server``; wait for the end.

    Nothing in ``config`` is left to derive (``automoe.config.frozen.resolved``).
    The function holds the run directory's lock, writes its ``config.yaml``, and forwards SIGTERM,
    SIGHUP and Ctrl-C to the ranks as a request to stop. The ranks are killed by a second Ctrl-C or
    after ``launch.grace_s`` seconds. A run that fails is started again from its newest checkpoint,
    up to ``launch.max_restarts`` times. Call this function from the main thread: ranks die with the
    thread that made them.

    Raises:
        ConfigError: ``run_dir`` cannot be written, or it holds a run with other settings.
        LaunchError: another run holds the lock of ``run_dir``.
    """
    run_dir = Path(config.run_dir).absolute()
    checkpoints = run_dir / FOLDER
    limit = config.launch.max_restarts
    with runs.locked(run_dir) as run_dir_lost:
        # The check is repeated under the lock: another run may have used the directory until now.
        runs.check_same_run(run_dir, config)
        runs.start_run(run_dir)
        save_config(config, run_dir)
        earlier = _identity(checkpoints)
        failures = list[dict[str, Any]]()
        launch = _Launch(server, run_dir, num_ranks, config, run_dir_lost)
        with launch.forwarding_signals():
            while True:
                result = launch.attempt()
                if run_dir_lost() is not None:
                    return result
                if result.error is None or launch.signum is not None:
                    break
                step = last_step(run_dir)
                number = len(failures) + 1
                failures.append({"attempt": number, "step": step, "error": result.error})
                if (why_not := refusal(failures, limit)) is not None:
                    if limit:
                        say(f"no further attempt: {why_not}")
                    break
                after = "" if step is None else f" after step {step}"
                say(
                    f"attempt {number} failed{after}: {runs.describe_error(result.error)}\n"
                    f"starting again from the newest checkpoint: restart {number} of at most {limit}"
                )
                runs.start_again(run_dir, number)
                if config.checkpoint.resume == "never" and earlier != _identity(checkpoints):
                    # The first attempt has set the old checkpoints aside; the next attempt
                    # continues from the first attempt's checkpoints.
                    config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
                    save_config(config, run_dir)
            if limit:
                with runs.telling():
                    status = runs.read_status(run_dir) | {"failed_attempts": failures}
                    replace_json(run_dir / runs.STATUS_FILE, status)
    return result


@dataclass
class _Launch:
    """Ranks of one run, over all its attempts.

    Attributes:
        server: process that forks the ranks.
        run_dir, num_ranks, config: directory, number of ranks and resolved configuration of the
            run.
        run_dir_lost: function that returns an error message if the directory was removed, else
            None.
        signum: signal that asked the run to stop, if any.
        kill_at: monotonic time in s at which the ranks are killed; infinite before such a signal.
        gave_up: True if ranks did not leave in time and were killed.
        ranks: processes of the present attempt.
        killed: ranks that the launcher itself killed.
    """

    server: ForkServer
    run_dir: Path
    num_ranks: int
    config: Config
    run_dir_lost: Callable[[], str | None]
    signum: int | None = None  # signal that asked the run to stop
    kill_at: float = math.inf  # monotonic time (s), finite once a signal has asked to stop
    gave_up: bool = False  # True if ranks did not leave in time and were killed
    ranks: list[ForkedRank] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)  # ranks that this process killed

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Context manager in which SIGTERM, SIGHUP and Ctrl-C ask the ranks to stop, also between attempts."""
        old = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def attempt(self) -> RunResult:
        """Start every rank, wait for the end, and return the result."""
        self.ranks = []
        self.killed = set()
        with store_file() as store, _rank_output() as stdout:
            options = {"run_dir": self.run_dir, "store": store, "launcher": os.getpid()}
            job = Job(run_rank, self.num_ranks, options, sys.path)
            try:
                self.ranks = self.server.start(job, stdout)
                if self.signum is not None:
                    self._ask_to_stop()
                self._wait()
            finally:
                self._kill()
        if (lost := self.run_dir_lost()) is not None:
            return RunResult("failed", None, runs.error_report(LaunchError(lost), None))
        return self._judge()

    def _wait(self) -> None:
        """Wait until every rank has left; kill ranks that outlive a failure or a stop request."""
        failed_at = math.inf
        while any([rank.poll() is None for rank in self.ranks]):
            now = time.monotonic()
            if failed_at == math.inf and any(rank.returncode for rank in self.ranks):
                failed_at = now
                if (killed := self._killed_rank(None)) is not None:
                    with runs.telling():
                        runs.record_failure(self.run_dir, killed)  # other ranks see this and leave
            if now > self.kill_at:
                say(
                    f"the ranks have not left in launch.grace_s={self.config.launch.grace_s} s and are killed; "
                    "what they did since the newest checkpoint is lost. Give them more time, or save more often "
                    "(checkpoint.every)"
                )
                self._give_up()
            elif now > failed_at + _KILL_AFTER_S or self.run_dir_lost() is not None:
                self._kill()
            time.sleep(0.1)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            self._give_up()
            return
        # The attribute is set before the message is written: a user who reads the message may send
        # the second signal during this call.
        first = self.signum is None
        self.signum = signum
        if first:
            self.kill_at = time.monotonic() + self.config.launch.grace_s
            name = signal.Signals(signum).name
            # os.write replaces print(), which a signal handler may interrupt.
            saves = self.config.checkpoint.saves
            then = "save" if saves else "leave without saving (checkpoint.every=0)"
            told = f"\n{name}: the ranks finish their step and {then}; Ctrl-C ends them at once\n"
            with suppress(OSError):  # SIGHUP comes when the terminal is gone
                os.write(2, told.encode())
        self._ask_to_stop()

    def _give_up(self) -> None:
        self.gave_up = True
        self.kill_at = math.inf
        self._kill()

    def _ask_to_stop(self) -> None:
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.poll() is None:
                self.killed.add(number)
                rank.kill()

    def _judge(self) -> RunResult:
        status = {}
        with runs.telling():
            status = runs.read_status(self.run_dir)
        state = status.get("state", "running")
        failure = None
        if state not in ("done", "preempted"):
            # Errors of other ranks are a consequence: they lost the killed rank in a collective.
            failure = self._killed_rank(status.get("error"))
        if failure is None and state in ("starting", "running"):
            if self.gave_up:
                with runs.telling():
                    runs.write_status(self.run_dir, "preempted", objective=None)
                state = "preempted"
            else:
                ended = ", ".join(
                    f"rank {number} with status {rank.returncode}"
                    for number, rank in enumerate(self.ranks)
                    if number not in self.killed
                )
                error = f"ranks ended without a result: {ended}; see above and logs/rank*.log"
                failure = runs.read_failure(self.run_dir) or runs.error_report(
                    LaunchError(error), None
                )
        if failure is not None:
            state = "failed"
            with runs.telling():
                # This overrules a report that a rank began to write on a full disk.
                runs.record_failure(self.run_dir, failure, overrule=True)
        signum = self.signum if state == "preempted" else None
        return RunResult(state, status.get("objective"), failure or status.get("error"), signum)

    def _killed_rank(self, recorded: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the error report (``error_report``) of a rank that a signal from outside killed, else None.

        A killed rank cannot report its own end; the others then report a lost connection.

        Args:
            recorded: the first error on record, if any. If it is not a lost connection, it came
                before any kill, and the result is None.
        """
        if recorded is not None and recorded["type"] not in _LOST_PEER_TYPES:
            return None
        for number, rank in enumerate(self.ranks):
            if number in self.killed or rank.returncode is None or rank.returncode >= 0:
                continue
            if recorded is not None and rank.returncode == -signal.SIGABRT:
                continue  # NCCL's watchdog aborts the ranks that outlive a failure
            end = f"killed by {signal.Signals(-rank.returncode).name}"
            if rank.returncode == -signal.SIGKILL:
                end += ", often by the kernel when memory runs out: see dmesg, or lower train.micro_batch_size"
            return runs.error_report(LaunchError(end), number)
        return None


@contextmanager
def _rank_output() -> Iterator[int]:
    """Yield a file descriptor for rank 0's standard output.

    It is this process's own standard output if ``print`` writes there. In a notebook ``print``
    writes elsewhere, so rank 0 writes into a pipe, and a thread prints its lines.
    """
    is_rank = False
    with suppress(OSError, ValueError, AttributeError):
        is_rank = sys.stdout.fileno() == 1
    if is_rank:
        yield 1
        return
    reader, writer = os.pipe()
    printer = threading.Thread(target=_pass_on, args=(reader,), daemon=True)
    printer.start()
    try:
        yield writer
    finally:
        os.close(writer)
        printer.join(timeout=5)  # a process that rank 0 left behind may hold the pipe


def _pass_on(reader: int) -> None:
    with open(reader, "rb") as lines:
        for line in lines:
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()


def refusal(failures: Sequence[Mapping[str, Any]], limit: int) -> str | None:
    """Return why a run must not be started again after the last of ``failures``; None if it may.

    A new attempt is refused after an error meant for users (except ``LaunchError``), after ``limit``
    restarts, and after an attempt that got no further than an earlier one.

    Args:
        failures: of each failed attempt ``step``, its last recorded step (None if it recorded no
            steps), and ``error``, the report of its first error (``error_report``).
        limit: ``launch.max_restarts``.
    """
    *before, last = failures
    error = last["error"]
    step = last["step"]
    furthest = max((failure["step"] or 0 for failure in before), default=-1)
    if error["for_user"] and error["type"] != "LaunchError":
        return f"{error['type']}: another attempt would end the same way"
    if len(failures) > limit:
        return f"launch.max_restarts={limit} is used up"
    if step is not None and before and step <= furthest:
        return f"the last attempt got no further than step {step}, and an earlier one to step {furthest}"
    return None


def last_step(run_dir: Path) -> int | None:
    """Return the last step in ``metrics.jsonl``, or 0 if it has no complete line.

    Returns None if the file does not exist or cannot be read.
    """
    from automoe.observe.metrics import METRICS_FILE, read_metrics

    with suppress(OSError):
        if (run_dir / METRICS_FILE).exists():
            return max((record["step"] for record in read_metrics(run_dir)), default=0)
    return None


def _identity(folder: Path) -> int | None:
    return folder.stat().st_ino if folder.exists() else None
