"""One rank: frozen configuration in, exit status out. torchrun runs ``python -m automoe.launch.worker RUN_DIR``.

Torch is imported late, after signal handlers, log files and the process id are in place: a rank that
is asked to stop while it is still importing must hear of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from automoe.config.frozen import frozen_shape, load_config
from automoe.config.schema import Config
from automoe.errors import LaunchError
from automoe.launch import ranks, stuck
from automoe.launch import run_dir as runs
from automoe.shipped import load_recipe
from automoe.training.context import RunContext, StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0  # for a rank to end on its own once another has failed
_leaving = threading.Lock()


class _Log:
    """Text stream to this rank's log; a disk that has no room for a line costs the line, and not the run."""

    def __init__(self, log: TextIO) -> None:
        self._log = log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._log.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class _Tee:
    """Text stream to the terminal and to a log; everything else is the terminal's."""

    def __init__(self, terminal: TextIO, log: _Log) -> None:
        self._terminal, self._log = terminal, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._terminal.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def main() -> int:
    """Run the rank that torchrun's environment describes, in the run directory of the command line."""
    env = os.environ
    return run_rank(Path(sys.argv[1]), int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_RANK"]))


def run_rank(
    run_dir: Path, rank: int, world_size: int, local_rank: int, config: Config | None = None, store: Store | None = None
) -> int:
    """Run the recipe on this rank and return its exit status; never raises.

    Args:
        run_dir: takes logs, status and everything the recipe writes.
        config: resolved configuration; None reads ``run_dir/config.yaml``.
        store: where ranks meet; None takes torch's ``env://``.
    """
    terminal = _redirect(run_dir, rank)
    stop = StopRequest()
    launcher = ranks.local_launcher_pid()
    _handle_signals(stop, launcher)
    pid_file = run_dir / runs.LOG_FOLDER / f"rank{rank}.pid"
    pid_file.write_text(str(os.getpid()))
    if (run_dir / runs.STOP_FILE).exists():  # asked to stop before this process could listen
        stop.set()
    # Where this project's launcher outlives the ranks it writes the report, and under torchrun and srun rank 0.
    report = rank == 0 and launcher is None and config is not None and config.observe.report
    stuck.start_recording()
    watch = stuck.StuckWatch(run_dir, rank, world_size)
    may_leave = None if launcher is None else stop
    threading.Thread(target=_watch, args=(run_dir, watch, report, may_leave), daemon=True).start()
    try:
        config = config or load_config(run_dir, plugins=True)
        watch.timeout_s = config.launch.timeout_s
        objective, preempted = _run_recipe(config, run_dir, rank, world_size, local_rank, store, stop)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk, which _fail survives too
            watch.explain(error)
        _fail(run_dir, rank, error, terminal if launcher is None else None, report)
    if rank == 0:
        runs.write_status(run_dir, "preempted" if preempted else "done", objective=objective)
    return 0


def _run_recipe(
    config: Config, run_dir: Path, rank: int, world_size: int, local_rank: int, store: Store | None, stop: StopRequest
) -> tuple[float | None, bool]:
    """The recipe's objective, and whether all ranks agreed to leave before its end."""
    shape = frozen_shape(config)
    if shape.world_size != world_size:
        raise LaunchError(f"the mesh holds {shape.world_size} ranks, and {world_size} were started")
    recipe = load_recipe(config.recipe).main
    device = ranks.init_ranks(config.launch, rank, world_size, local_rank, store)
    if rank == 0:
        runs.write_status(run_dir, "running", pid=ranks.local_launcher_pid() or os.getpid())
    context = RunContext(rank, world_size, local_rank, device, run_dir, stop)
    objective = recipe(config, shape, context)
    ranks.close_ranks()
    return None if objective is None else float(objective), context.preempted


def _redirect(run_dir: Path, rank: int) -> TextIO:
    """Keep this rank's output in ``logs/rankN.log``; rank 0's stdout goes to the terminal as well.

    Returns the stderr that this process was started with.

    File descriptors, not only ``sys.stderr``: C++ warnings must not tear the progress line.
    """
    log = open(run_dir / runs.LOG_FOLDER / f"rank{rank}.log", "w", buffering=1)
    terminal = os.fdopen(os.dup(2), "w")
    os.dup2(log.fileno(), 2)
    sys.stderr = _Log(sys.stderr)
    if rank == 0:
        sys.stdout = _Tee(sys.stdout, _Log(log))
    else:
        os.dup2(log.fileno(), 1)
        sys.stdout = _Log(sys.stdout)
    faulthandler.enable(log)
    return terminal


def _handle_signals(stop: StopRequest, launcher: int | None) -> None:
    def ask_to_stop(signum: int, frame: object) -> None:
        # Nothing that takes a lock, such as starting a thread: the main thread, interrupted here, may hold it.
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop if launcher is None else signal.SIG_IGN)
    if launcher is not None and sys.platform == "linux":
        # torchrun puts every rank in a session of its own: if it dies by SIGKILL nobody else ends them.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have died before: then whoever adopts orphans is the parent, and not a child of the launcher.
        if _parent(os.getppid()) != launcher:
            os._exit(1)


def _parent(pid: int) -> int | None:
    """Process id of a process's parent; None where there is no such process (any more)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _watch(run_dir: Path, watch: stuck.StuckWatch, report: bool, stop: StopRequest | None) -> None:
    """Leave soon after another rank has failed, even from inside a collective that nobody will join.

    Args:
        stop: leave also soon after it is set, unless this project's launcher asked for that; None: it may be anybody.
    """
    while not (run_dir / runs.ERROR_FILE).exists():
        if stop is not None and stop.since is not None and time.monotonic() - stop.since > _GRACE_S:
            # torchrun clears up because another rank is gone, and this one may wait for that rank in a collective.
            # A scheduler that signals every process of a job makes the launcher ask as well.
            if not (run_dir / runs.STOP_FILE).exists():
                os._exit(1)
        try:
            watch.look()
        except Exception:
            # It reads what the main thread is changing, and this rank must be able to leave all the same.
            traceback.print_exc()
        time.sleep(0.5)
    time.sleep(_GRACE_S)
    _leave(run_dir, report)


def _leave(run_dir: Path, report: bool) -> None:
    """End this process at once, after writing the report where that is this rank's to do."""
    _leaving.acquire()  # the rank's own error and the watch over the others may both come here
    try:
        if report:
            from automoe.observe.report import write_report

            write_report(run_dir)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever became of the report: threads that wait for a lost peer would keep the process


def _fail(run_dir: Path, rank: int, error: BaseException, terminal: TextIO | None, report: bool) -> None:
    """Report the error and leave at once: closing a broken process group can wait for the lost peer.

    ``terminal`` is where to show it if it is the first; None where the launcher does that.
    """
    with contextlib.suppress(OSError):  # a full disk: this rank must leave all the same
        if runs.report_error(run_dir, error, rank) and terminal is not None:
            print(f"error: {runs.describe_error(runs.read_status(run_dir)['error'])}", file=terminal, flush=True)
    traceback.print_exception(error)  # to this rank's log
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed terminal must not hide the exit status
            stream.flush()
    _leave(run_dir, report)


def end_process(status: int) -> NoReturn:
    """Leave without unloading torch: everything is written and closed by now.

    Seen without this: now and then a thread of the communication library is still there when the
    interpreter goes, and a run that had ended well ends in SIGABRT.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    end_process(main())
