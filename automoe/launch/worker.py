"""One rank: frozen configuration in, exit status out.

Under torchrun and srun torch is imported late, after signal handlers, log files and the process id
are in place: a rank that is asked to stop while it is still importing must hear of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from automoe.config.frozen import frozen_shape, load_config
from automoe.config.schema import Config
from automoe.config.shipped import load_recipe
from automoe.errors import AutomoeError, LaunchError, show_everything
from automoe.hf.identity import complete
from automoe.launch import ranks, stuck
from automoe.launch import run_dir as runs
from automoe.training.context import RunContext, StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

# They ask a run to save and leave. nohup has SIGHUP ignored, and that is to stay.
_HANG_UP = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *_HANG_UP)
_LONGEST_PAUSE_S = 4.0  # other ranks wait for ten seconds to hear where this one is
_GRACE_S = 5.0  # for a rank to end on its own once another has failed
_leaving = threading.Lock()


class Outlet:
    """Text stream to one or more others. A line that one of them does not take is lost there, and
    the run goes on.

    Whatever else is asked of it, the first one answers.
    """

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams
        for stream in streams:
            show_everything(stream)

    def write(self, text: str) -> int:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams[0], name)


def outlive_streams() -> None:
    """From now on neither this process nor its children depend on who reads their standard output
    and error."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # closed: the next file that is opened would be every child's standard output
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
            os.set_inheritable(number, True)
    sys.stdout, sys.stderr = Outlet(sys.stdout), Outlet(sys.stderr)


def run_rank(
    run_dir: Path,
    rank: int,
    world_size: int,
    local_rank: int | None = None,
    config: Config | None = None,
    store: Store | Path | None = None,
    launcher: int | None = None,
    run_dir_lost: Callable[[], str | None] = lambda: None,
    imports: ranks.Imports = ranks.NOT_IMPORTED,
) -> int:
    """Run the recipe on this rank and return its exit status; never raises.

    Args:
        run_dir: takes logs, status and everything the recipe writes.
        local_rank: rank on this machine; default: ``rank``.
        config: resolved configuration; None reads ``run_dir/config.yaml``.
        store: where ranks meet, as in ``init_ranks``.
        launcher: process id of the process that started the ranks; None under torchrun and srun.
        run_dir_lost: says what is wrong if the run directory is not the one that the run began in.
        imports: what came of importing torch for this rank, if that was done already.
    """
    local_rank = rank if local_rank is None else local_rank
    ranks.prepare_process()
    terminal = _redirect(run_dir, rank)
    sys.stderr.write(imports.output)
    stop = StopRequest()
    _handle_signals(stop)
    (run_dir / runs.LOG_FOLDER / f"rank{rank}.pid").write_text(str(os.getpid()))
    # Where this project's launcher outlives the ranks it writes the report, and under torchrun and
    # srun rank 0.
    report = rank == 0 and launcher is None and config is not None and config.observe.report
    watch = stuck.StuckWatch(run_dir, rank, world_size, terminal)
    watch.tells_errors = launcher is None
    threading.Thread(target=_watch, args=(run_dir, watch, report), daemon=True).start()
    try:
        if imports.error is not None:
            raise imports.error
        config = config or load_config(run_dir, plugins=True)
        watch.timeout_s = config.launch.timeout_s
        shape = frozen_shape(config)
        if shape.world_size != world_size:
            raise LaunchError(
                f"the mesh holds {shape.world_size} ranks, and {world_size} were started"
            )
        recipe = load_recipe(config.recipe)
        complete(config)  # a node that the launcher did not run on
        device = watch.device = ranks.init_ranks(config.launch, rank, world_size, local_rank, store)
        if rank == 0:
            runs.write_status(run_dir, "running", pid=launcher or os.getpid())
        context = RunContext(rank, world_size, local_rank, device, run_dir, stop)
        objective = recipe.main(config, shape, context)
        ranks.close_ranks()
        if (lost := run_dir_lost()) is not None:
            raise LaunchError(lost)
        if rank == 0:
            _write_result(config, context, objective)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk, which _fail survives too
            watch.explain(error)
        _fail(run_dir, rank, error, terminal if launcher is None else None, report)
    return 0


def _write_result(config: Config, context: RunContext, objective: float | None) -> None:
    outcome = None if objective is None else float(objective)
    if not context.preempted and not math.isfinite(outcome or 0.0):
        raise AutomoeError(f"the recipe {config.recipe} ended with {outcome}, which is no result")
    facts = {"fell_back": context.fell_back} if context.fell_back else {}
    runs.write_status(
        context.run_dir, "preempted" if context.preempted else "done", objective=outcome, **facts
    )


def _redirect(run_dir: Path, rank: int) -> TextIO:
    """Keep this rank's output in ``logs/rankN.log``; rank 0's stdout goes to the terminal as well.

    Returns the stderr that this process was started with.

    File descriptors, not only ``sys.stderr``: C++ warnings must not tear the progress line.
    """
    log = open(run_dir / runs.LOG_FOLDER / f"rank{rank}.log", "w", buffering=1, encoding="utf-8")
    terminal = os.fdopen(os.dup(2), "w")
    os.dup2(log.fileno(), 2)
    sys.stderr = Outlet(sys.stderr)
    if rank == 0:
        sys.stdout = Outlet(sys.stdout, log)
    else:
        os.dup2(log.fileno(), 1)
        sys.stdout = Outlet(sys.stdout)
    faulthandler.enable(log)
    return terminal


def _handle_signals(stop: StopRequest) -> None:
    for number in STOP_SIGNALS:
        # Nothing that takes a lock, such as starting a thread: the main thread, interrupted here,
        # may hold it.
        signal.signal(number, lambda signum, frame: stop.set())
    # our launcher starts ranks with them blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _watch(run_dir: Path, watch: stuck.StuckWatch, report: bool) -> None:
    """Leave soon after another rank has failed, even from inside a collective that nobody will
    join."""
    pause = look_every_s(watch.num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", watch.num_ranks)))
    while not (run_dir / runs.ERROR_FILE).exists():
        try:
            watch.look()
        except Exception:
            # It reads what the main thread is changing, and this rank must be able to leave all the
            # same.
            traceback.print_exc()
        time.sleep(pause)
    time.sleep(_GRACE_S)
    _leave(run_dir, report)


def look_every_s(num_ranks: int, ranks_here: int) -> float:
    """Between two looks at the run directory: a disk that nodes share is asked as often by a node
    as by one rank."""
    return min(0.5 * ranks_here, _LONGEST_PAUSE_S) if num_ranks > ranks_here else 0.5


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
        # whatever became of the report: threads that wait for a lost peer would keep the process
        os._exit(1)


def _fail(
    run_dir: Path, rank: int, error: BaseException, terminal: TextIO | None, report: bool
) -> None:
    """Report the error and leave at once: closing a broken process group can wait for the lost
    peer.

    ``terminal`` is where to show it if it is the first; None where the launcher does that.
    """
    failure, first = runs.error_report(error, rank), True
    with contextlib.suppress(OSError):  # a full disk: this rank must leave all the same
        first = runs.record_failure(run_dir, failure)
    if first and terminal is not None:
        with contextlib.suppress(OSError):
            print(f"error: {runs.describe_error(failure)}", file=terminal, flush=True)
    traceback.print_exception(error)  # to this rank's log
    sys.stdout.flush()
    sys.stderr.flush()
    _leave(run_dir, report)


def end_process(status: int) -> NoReturn:
    """Leave without unloading torch: everything is written and closed by now.

    Seen without this: now and then a thread of the communication library is still there when the
    interpreter goes, and a run that had ended well ends in SIGABRT.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
