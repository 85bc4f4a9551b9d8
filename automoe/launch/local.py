"""A run on this machine: its ranks are started, watched, stopped, judged by the status file, and
started again.

Ranks are forks of a process that has imported torch (``automoe.launch.fork_server``) and knows
nothing of runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from automoe.config.frozen import Device, resolved, save_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.launch import run_dir as runs
from automoe.launch.external import without_rendezvous
from automoe.launch.fork_server import ForkedRank, ForkServer, Job, fork_server
from automoe.launch.hardware import check_backends, start_notes
from automoe.launch.prepare import missing_data
from automoe.launch.ranks import LOOPBACK, check_system, store_file
from automoe.launch.worker import STOP_SIGNALS, run_rank

_LOST_PEER_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_KILL_AFTER_S = 8  # for the other ranks to leave by themselves once one has failed


@dataclass(frozen=True)
class RunResult:
    """How a run ended: ``state`` is done, failed or preempted."""

    state: str
    objective: float | None
    error: dict[str, Any] | None
    signum: int | None = None  # the signal that ended it early

    @property
    def exit_code(self) -> int:
        """0 done, 1 failed, 128 + signal preempted (143 after SIGTERM, 130 after Ctrl-C)."""
        if self.state == "done":
            return 0
        return 128 + self.signum if self.state == "preempted" and self.signum else 1


def train_here(
    config: Config, shape: MeshShape, device: Device, another_follows: bool = False
) -> RunResult:
    """Run a checked configuration on this machine, print how it ended, and write its report.

    Args:
        another_follows: keep the fork server for another run, which then need not import torch
            again.

    Raises:
        ConfigError, DataError, LaunchError, BackendError: the run could not be started.
    """
    check_system()
    check_backends(config, shape, device)
    if (missing := missing_data(config)) is not None:
        raise missing
    another = runs.check_same_run(Path(config.run_dir).absolute(), resolved(config, shape, device))
    for note in start_notes(config) + another:
        print(note, file=sys.stderr)
    ranks = "1 rank" if shape.world_size == 1 else f"{shape.world_size} ranks"
    print(f"starting {ranks} on {device} in {config.run_dir}", flush=True)
    with fork_server(_environment(config, shape.world_size), keep=another_follows) as server:
        from automoe.data.prepare import prepare_data
        from automoe.hf.identity import complete

        complete(config)
        prepare_data(config)  # a bad line or a missing file is found here, before ranks start
        result = launch_local(config, shape, device, server)
    if result.error is not None:
        error = runs.describe_error(result.error)
        print(f"error: {error}\nlogs of every rank: {config.run_dir}/logs", file=sys.stderr)
    elif result.state == "preempted":
        print("stopped before the last step, as asked", file=sys.stderr)
    if config.observe.report and Path(config.run_dir).is_dir():
        from automoe.observe.report import write_report

        # By this process and not by rank 0: a run that died by SIGKILL has a report too.
        if (report := write_report(config.run_dir)) is not None:
            print(f"report {report}", flush=True)
    return result


def _environment(config: Config, num_ranks: int) -> dict[str, str]:
    """Return the environment of the ranks."""
    env = without_rendezvous(os.environ) | LOOPBACK
    share = str(max(1, (os.cpu_count() or 1) // num_ranks))
    env["OMP_NUM_THREADS"] = str(
        config.launch.threads_per_rank or env.get("OMP_NUM_THREADS", share)
    )
    return env


def launch_local(config: Config, shape: MeshShape, device: Device, server: ForkServer) -> RunResult:
    """Run every rank of ``shape`` on this machine, as forks of ``server``, and wait for the end.

    Holds the run directory's lock, writes its ``config.yaml``, forwards SIGTERM, SIGHUP and Ctrl-C
    as a request to stop (a second Ctrl-C kills, and so does the end of ``launch.grace_s``). A run
    that fails is started again, from its newest checkpoint, up to ``launch.max_restarts`` times.
    Call it from the main thread: ranks die with the thread that made them.

    Raises:
        ConfigError: ``run_dir`` cannot be written, or another run is in it.
        LaunchError: another run holds it.
    """
    run_dir, frozen = Path(config.run_dir).absolute(), resolved(config, shape, device)
    limit = config.launch.max_restarts
    with runs.locked(run_dir) as run_dir_lost:
        # again: another run may have been there until the lock was free
        runs.check_same_run(run_dir, frozen)
        runs.start_run(run_dir)
        save_config(frozen, run_dir)
        earlier, failures = _identity(run_dir / "checkpoints"), list[dict[str, Any]]()
        launch = _Launch(server, run_dir, shape.world_size, config, run_dir_lost)
        with launch.forwarding_signals():
            while True:
                result = launch.attempt()
                if run_dir_lost() is not None:
                    return result
                if result.error is None or launch.signum is not None:
                    break
                if not _start_again(run_dir, result.error, failures, limit):
                    break
                if config.checkpoint.resume == "never" and earlier != _identity(
                    run_dir / "checkpoints"
                ):
                    # The first attempt has set aside what was there; the next goes on from its
                    # checkpoints.
                    config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
                    save_config(resolved(config, shape, device), run_dir)
            if limit:
                runs.add_to_status(run_dir, failed_attempts=failures)
    return result


def _start_again(
    run_dir: Path, error: dict[str, Any], failures: list[dict[str, Any]], limit: int
) -> bool:
    """Add a failed attempt to ``failures``, and make room for another one; False if none may
    follow."""
    step, number = last_step(run_dir), len(failures) + 1
    failures.append({"attempt": number, "step": step, "error": error})
    if (why_not := refusal(failures, limit)) is not None:
        if limit:
            print(f"no further attempt: {why_not}", file=sys.stderr, flush=True)
        return False
    after = "" if step is None else f" after step {step}"
    print(f"attempt {number} failed{after}: {runs.describe_error(error)}", file=sys.stderr)
    again = f"starting again from the newest checkpoint: restart {number} of at most {limit}"
    print(again, file=sys.stderr, flush=True)
    runs.start_again(run_dir, number)
    return True


class _Launch:
    """The ranks of one run, through all its attempts."""

    def __init__(
        self,
        server: ForkServer,
        run_dir: Path,
        num_ranks: int,
        config: Config,
        run_dir_lost: Callable[[], str | None],
    ) -> None:
        self.server, self.run_dir, self.num_ranks, self.run_dir_lost = (
            server,
            run_dir,
            num_ranks,
            run_dir_lost,
        )
        self.config = config
        self.signum: int | None = None
        self.kill_at = math.inf  # on the monotonic clock, once asked to stop
        self.gave_up = False  # the ranks did not leave when asked to, and were killed
        self.ranks: list[ForkedRank] = []
        self.killed: set[int] = set()  # ranks that this process killed

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Have SIGTERM, SIGHUP and Ctrl-C ask the ranks to stop, between two attempts as well."""
        old = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def attempt(self) -> RunResult:
        """Start every rank, wait for the end, and return how it ended."""
        self.ranks, self.killed = [], set()
        with store_file() as store, _rank_output() as stdout:
            options = {"run_dir": self.run_dir, "store": store, "launcher": os.getpid()}
            try:
                self.ranks = self.server.start(
                    Job(run_rank, self.num_ranks, options, sys.path), stdout
                )
                if self.signum is not None:
                    self._ask_to_stop()
                self._wait()
            finally:
                self._kill()
        if (lost := self.run_dir_lost()) is not None:
            return RunResult("failed", None, runs.launch_failure(None, lost))
        return self._judge()

    def _wait(self) -> None:
        """Wait until every rank has left. Kill ranks that outlive a failed one, or a request to
        stop."""
        failed_at = math.inf
        while any([rank.poll() is None for rank in self.ranks]):
            now = time.monotonic()
            if failed_at == math.inf and any(rank.returncode for rank in self.ranks):
                failed_at = now
                if (killed := self._killed_rank(None)) is not None:
                    with contextlib.suppress(OSError):
                        runs.record_failure(self.run_dir, killed)  # the others see it and leave
            if now > self.kill_at:
                self._end_grace()
            elif now > failed_at + _KILL_AFTER_S or self.run_dir_lost() is not None:
                self._kill()
            time.sleep(0.1)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            self._give_up()
            return
        # Before the line is written: whoever reads it may send the second signal into this call.
        first, self.signum = self.signum is None, signum
        if first:
            self.kill_at = time.monotonic() + self.config.launch.grace_s
            name = signal.Signals(signum).name
            # Not print(): a handler may interrupt one.
            then = (
                "save"
                if self.config.checkpoint.saves
                else "leave without saving (checkpoint.every=0)"
            )
            with contextlib.suppress(OSError):  # SIGHUP comes when the terminal is gone
                os.write(
                    2,
                    f"\n{name}: the ranks finish their step and {then}; Ctrl-C ends them at once\n".encode(),
                )
        self._ask_to_stop()

    def _end_grace(self) -> None:
        why = f"the ranks have not left in launch.grace_s={self.config.launch.grace_s} s and are killed; what they did "
        why += "since the newest checkpoint is lost. Give them more time, or save more often (checkpoint.every)"
        print(why, file=sys.stderr, flush=True)
        self._give_up()

    def _give_up(self) -> None:
        self.gave_up, self.kill_at = True, math.inf
        self._kill()

    def _ask_to_stop(self) -> None:
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        """Kill the ranks that still live: none may be left behind."""
        for number, rank in enumerate(self.ranks):
            if rank.poll() is None:
                self.killed.add(number)
                rank.kill()

    def _judge(self) -> RunResult:
        status = runs.read_status(self.run_dir)
        killed = self._killed_rank(status.get("error"))
        if killed is not None and status["state"] not in ("done", "preempted"):
            # What the other ranks say is a consequence: they lost this one in a collective.
            runs.record_failure(self.run_dir, killed, overrule=True)
        elif status["state"] in ("starting", "running"):
            if self.gave_up:
                runs.write_status(self.run_dir, "preempted", objective=None)
            else:
                ended = [
                    f"rank {n} with status {r.returncode}"
                    for n, r in enumerate(self.ranks)
                    if n not in self.killed
                ]
                message = f"ranks ended without a result: {', '.join(ended)}; see above and logs/rank*.log"
                # Overruled: a report that a rank began and had no room for.
                failure = runs.read_failure(self.run_dir) or runs.launch_failure(None, message)
                runs.record_failure(self.run_dir, failure, overrule=True)
        status = runs.read_status(self.run_dir)
        signum = self.signum if status["state"] == "preempted" else None
        return RunResult(status["state"], status.get("objective"), status.get("error"), signum)

    def _killed_rank(self, recorded: dict[str, Any] | None) -> dict[str, Any] | None:
        """The failure of a rank that a signal ended, and not this process, where that is this run's
        first error.

        A rank that dies so cannot report; its peers report that the connection is gone.
        """
        if recorded is not None and recorded["type"] not in _LOST_PEER_TYPES:
            return None
        for number, rank in enumerate(self.ranks):
            if number in self.killed or rank.returncode is None or rank.returncode >= 0:
                continue
            if recorded is not None and rank.returncode == -signal.SIGABRT:
                continue  # NCCL's watchdog aborts the ranks that outlive a failure
            what = f"killed by {signal.Signals(-rank.returncode).name}"
            if rank.returncode == -signal.SIGKILL:
                what += ", often by the kernel for want of memory: see dmesg, or lower train.micro_batch_size"
            return runs.launch_failure(number, what)
        return None


@contextlib.contextmanager
def _rank_output() -> Iterator[int]:
    """Give a file descriptor for rank 0's standard output: this process's own, if ``print`` writes
    there.

    In a notebook it does not; there a thread prints what rank 0 writes into a pipe.
    """
    own = False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        own = sys.stdout.fileno() == 1
    if own:
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
    """Why no attempt follows the last of ``failures``; None where one does.

    Args:
        failures: per failed attempt its number, the last step it recorded (None: it kept no record
            of steps) and its first error.
        limit: ``launch.max_restarts``.
    """
    *before, last = failures
    error, step = last["error"], last["step"]
    furthest = max((failure["step"] or 0 for failure in before), default=-1)
    if error["for_user"] and error["type"] != "LaunchError":
        return f"{error['type']}: another attempt would end the same way"
    if len(failures) > limit:
        return f"launch.max_restarts={limit} is used up"
    if step is not None and before and step <= furthest:
        return f"the last attempt got no further than step {step}, and an earlier one to step {furthest}"
    return None


def last_step(run_dir: Path) -> int | None:
    """The last step in ``metrics.jsonl``; None where there is none to read, 0 before its first line
    is complete."""
    from automoe.observe.metrics import METRICS_FILE, read_metrics

    if not (run_dir / METRICS_FILE).exists():
        return None
    try:
        records = read_metrics(run_dir)
    except OSError:
        return None
    return records[-1]["step"] if records else 0


def _identity(folder: Path) -> int | None:
    return folder.stat().st_ino if folder.exists() else None
