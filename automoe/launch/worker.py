"""Process of one rank: it reads the frozen configuration, runs the recipe and reports the outcome.

Under torchrun and srun, torch is imported after the signal handlers, log files and process id file
are in place, so that a rank can be stopped while it is still importing.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from automoe.config.frozen import frozen_shape, load_config
from automoe.config.schema import Config
from automoe.config.shipped import load_recipe
from automoe.errors import AutomoeError, LaunchError, in_words, show_everything
from automoe.hf.identity import complete
from automoe.launch import ranks, stuck
from automoe.launch import run_dir as runs
from automoe.storage.files import replace_file
from automoe.training.context import RunContext, StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

# These signals ask a run to save and leave. Under nohup, SIGHUP is ignored and stays so.
_HANG_UP = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *_HANG_UP)
_LONGEST_PAUSE_S = 4.0  # other ranks wait ten seconds for this rank's position
_GRACE_S = 5.0  # time for a rank to end on its own once another has failed
_leaving = threading.Lock()


class Outlet:
    """Text stream that writes to one or more streams, and ignores their ``OSError``.

    A full disk or a closed terminal thus loses output but does not end the run. All other
    attributes are those of the first stream.

    Args:
        streams: where text is written; characters that a stream cannot encode are escaped.
        lost: function that is called with the error and the text that the last stream did not take.
    """

    def __init__(
        self, *streams: TextIO, lost: Callable[[OSError, str], None] = lambda *_: None
    ) -> None:
        self._streams = [show_everything(stream) for stream in streams]
        self._lost = lost

    def write(self, text: str) -> int:
        for stream in self._streams:
            try:
                stream.write(text)
            except OSError as error:
                if stream is self._streams[-1]:
                    self._lost(error, text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            with suppress(OSError):
                stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams[0], name)


def outlive_streams() -> None:
    """Let this process and its children survive closed or failing standard streams.

    Closed ones become /dev/null; writing to stdout and stderr no longer raises ``OSError``.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # If a standard stream is closed, the next file that opens would take its number, and
        # children would inherit that file as their standard stream.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
            os.set_inheritable(number, True)
    sys.stdout = Outlet(sys.stdout)
    sys.stderr = Outlet(sys.stderr)


def _handle_signals(stop: StopRequest) -> None:
    """Make SIGTERM, SIGINT and SIGHUP (unless ignored) set ``stop``, which the training loop reads."""
    for number in STOP_SIGNALS:
        # The handler must take no lock (starting a thread takes one): it interrupts the main
        # thread, which may hold that lock.
        signal.signal(number, lambda signum, frame: stop.set())
    # automoe's launcher starts ranks with these signals blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


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
    """Run the recipe on this rank and return exit status 0; on an error, end the process with 1.

    Args:
        run_dir: folder of logs, status and all files that the recipe writes.
        local_rank: rank on this machine; default: ``rank``.
        config: resolved configuration; None reads ``run_dir/config.yaml``.
        store: store where ranks meet, or the file of a ``FileStore``; None uses torch's ``env://``.
        launcher: process id of automoe's launcher; None under torchrun and srun.
        run_dir_lost: function that returns an error message if the run directory was removed or
            replaced, else None.
        imports: outcome of the fork server's imports, if it started this rank.
    """
    local_rank = rank if local_rank is None else local_rank
    ranks.prepare_process()
    terminal = Outlet(os.fdopen(os.dup(2), "w", buffering=1))
    _redirect(run_dir, rank, terminal)
    sys.stderr.write(imports.output)
    stop = StopRequest()
    _handle_signals(stop)
    # automoe's launcher outlives the ranks and writes the report; under torchrun and srun rank 0
    # writes it.
    report = rank == 0 and launcher is None and config is not None and config.observe.report
    watch = stuck.StuckWatch(run_dir, rank, world_size, terminal, launcher is None)
    try:
        replace_file(run_dir / runs.LOG_FOLDER / f"rank{rank}.pid", str(os.getpid()))
        threading.Thread(target=_watch, args=(watch, report), daemon=True).start()
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
        complete(config)  # the launcher may have done this on another node only
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
        with suppress(OSError):  # the disk may be full
            watch.explain(error)
        _fail(run_dir, rank, error, terminal, launcher is None, report)
    return 0


def _write_result(config: Config, context: RunContext, objective: float | None) -> None:
    outcome = None if objective is None else float(objective)
    state = "preempted" if context.preempted else "done"
    if state == "done" and not math.isfinite(outcome or 0.0):
        raise AutomoeError(
            f"the recipe {config.recipe} ended with {outcome}, which is not a result"
        )
    facts = {"fell_back": context.fell_back} if context.fell_back else {}
    try:
        runs.write_status(context.run_dir, state, objective=outcome, **facts)
    except OSError as error:
        raise AutomoeError(
            f"the run is {state}, its objective {outcome}, and {runs.STATUS_FILE} cannot say so: {in_words(error)}"
        ) from error


def _redirect(run_dir: Path, rank: int, terminal: Outlet) -> None:
    """Send this rank's output to ``logs/rankN.log``; warn if there can be no such file.

    Rank 0's stdout also stays on the terminal; warnings go to ``terminal``. File descriptor 2 is
    redirected, not only ``sys.stderr``, so that warnings from C++ do not break the progress line.
    """
    path = run_dir / runs.LOG_FOLDER / f"rank{rank}.log"
    try:
        log = open(path, "w", buffering=1, encoding="utf-8")
    except OSError as error:
        print(f"warning: rank {rank} has no log: {in_words(error)}", file=terminal)
        log = open(os.devnull, "w")
    told = []

    def lost(error: OSError, text: str) -> None:
        if not told:
            told.append(error)
            loss = f"{len(text):,} bytes could not be written, and later output may be lost too"
            print(f"warning: {path}: {error.strerror}: {loss}", file=terminal)

    os.dup2(log.fileno(), 2)
    sys.stderr = Outlet(sys.stderr, lost=lost)
    if rank == 0:
        sys.stdout = Outlet(sys.stdout, log, lost=lost)
    else:
        os.dup2(log.fileno(), 1)
        sys.stdout = Outlet(sys.stdout, lost=lost)
    faulthandler.enable(log)


def _watch(watch: stuck.StuckWatch, report: bool) -> None:
    """Check for stuck ranks (``watch.look``) until any rank has failed; 5 s later end this process with status 1.

    This runs in a thread, so it also ends a rank whose collective its peers will never join.

    Args:
        report: write ``report.html`` before the process ends.
    """
    pause = look_every_s(watch.num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", watch.num_ranks)))
    while not (watch.run_dir / runs.ERROR_FILE).exists():
        try:
            watch.look()
        except Exception:
            # The watch reads state that the main thread changes and may fail; this loop must still
            # see another rank's error.
            traceback.print_exc()
        time.sleep(pause)
    time.sleep(_GRACE_S)
    _leave(watch.run_dir, report)


def look_every_s(num_ranks: int, ranks_here: int) -> float:
    """Return the seconds after which a rank checks the run directory again: 0.5 on one node.

    If this node has only ``ranks_here`` of the run's ``num_ranks``, nodes share a disk, and it is
    0.5 for each rank here, at most 4, so that a node reads the disk as often as one rank would.
    """
    return min(0.5 * ranks_here, _LONGEST_PAUSE_S) if num_ranks > ranks_here else 0.5


def _leave(run_dir: Path, report: bool) -> None:
    """End this process at once with status 1, after writing report.html if ``report`` is True."""
    _leaving.acquire()  # the main thread and the watching thread may both call this
    try:
        if report:
            from automoe.observe.report import write_report

            write_report(run_dir)
    except Exception:
        traceback.print_exc()
    finally:
        # A normal exit would wait for threads that wait for a lost peer.
        os._exit(1)


def _fail(
    run_dir: Path, rank: int, error: BaseException, terminal: Outlet, tells: bool, report: bool
) -> None:
    """Record the error in ``run_dir`` unless another rank failed first; end with status 1.

    The process group stays open: closing a broken one can wait for the lost peer forever.

    Args:
        terminal: stream that shows the error if it is the run's first.
        tells: False if automoe's launcher shows the error that this rank records.
        report: write ``report.html`` before the process ends.
    """
    failure = runs.error_report(in_words(error), rank)
    first = True
    try:
        first = runs.record_failure(run_dir, failure)
    except OSError as lost:  # this rank must leave even if the disk is full
        tells |= runs.read_failure(run_dir) is None
        print(f"warning: {in_words(lost)}", file=terminal)
    if first and tells:
        print(f"error: {runs.describe_error(failure)}", file=terminal)
    traceback.print_exception(error)  # to this rank's log
    sys.stdout.flush()
    sys.stderr.flush()
    _leave(run_dir, report)


def end_process(status: int) -> NoReturn:
    """Flush the standard streams and end this process without unloading torch.

    A normal exit sometimes ends in SIGABRT after a run that went well, because a thread of the
    communication library outlives the interpreter.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
