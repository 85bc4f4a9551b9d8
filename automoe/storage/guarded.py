"""Work on untrusted files in a forked child, with limits of processor time and memory.

A template may loop forever; a regular expression may backtrack for years, or overflow the stack of
native code. In a child, either becomes an error that names what the child was doing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import pickle
import resource
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from automoe.errors import AutomoeError, DataError, in_words

T = TypeVar("T")

MAX_SECONDS = 60  # of processor time for one step of the work; ``doing`` begins a step
# Bytes of memory that the work may add: half of the machine's memory.
MAX_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
_PR_SET_PDEATHSIG = 1
_place: mmap.mmap | None = None  # in a child: name of the current step, shared with the parent


def doing(work_name: str, goes_on: bool = False) -> None:
    """Begin a step of the work that ``guarded`` runs in a child process; do nothing elsewhere.

    A step has ``MAX_SECONDS`` (60) of processor time.

    Args:
        work_name: name of the step, for an error.
        goes_on: True if a current step of the same name continues, without new time.
    """
    if _place is not None and not (goes_on and _text_of(_place) == work_name):
        _place[:] = work_name.encode(errors="replace")[: len(_place)].ljust(len(_place), b"\0")
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)


def fork() -> int:
    """Fork this process and return the child's id (0 in the child), without a warning about threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def guarded(work_name: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, computed in a fork of this process.

    Changes to objects are lost, except in the result. ``work`` may call ``doing`` to begin a step. A step
    has 60 seconds of processor time, and the child may add half of the machine's memory to what this process holds.

    Args:
        work_name: name of the first step, for an error.

    Raises:
        DataError: a step took too long or too much memory, or ended the child.
        LaunchError: no further process can be started.
        Exception: the error of ``work``.
    """
    global _place
    place = mmap.mmap(-1, 1024)
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    try:
        child = fork()
    except OSError as failed:
        # Callers would take an ``OSError`` for an error of a file that they read or write.
        raise in_words(failed) from None
    if not child:
        _place = place
        _work(work_name, work, writing, parent)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as stream:
            raw = stream.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = int(signal.SIGKILL)
        with suppress(ChildProcessError):  # if whoever started this process ignores SIGCHLD
            _, status = os.waitpid(child, 0)
    ended = -os.waitstatus_to_exitcode(status)
    now = _text_of(place)
    if ended == signal.SIGINT:
        raise KeyboardInterrupt
    if raw:
        result, error = pickle.loads(raw)
        if error is None:
            return result
        if not isinstance(error, MemoryError):
            raise error
        said = f"takes more than {MAX_BYTES / 1e9:,.1f} GB of memory"
    elif ended == signal.SIGPROF:
        said = f"takes more than {MAX_SECONDS} seconds of processor time"
    else:
        name = signal.Signals(ended).name if ended > 0 else f"status {-ended}"
        said = f"ends the process that reads it ({name})"
    raise DataError(f"{now}: this {said}. Correct it, or use another file")


def _text_of(place: mmap.mmap | None) -> str:
    return bytes(place or b"").rstrip(b"\0").decode(errors="ignore")


def _work(work_name: str, work: Callable[[], Any], writing: int, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # the error says what ended this process
        limit_memory()
        doing(work_name)
        answer: tuple[Any, BaseException | None] = work(), None
    except BaseException as error:
        if not isinstance(error, (AutomoeError, MemoryError)):
            error.add_note("".join(traceback.format_exception(error)))
        # Native code of tokenizers raises a bare ``Exception``, or panics, which are none.
        if type(error) is Exception or not isinstance(error, Exception):
            error = DataError(f"{_text_of(_place)}: {error}. Correct it, or use another file")
        answer = None, error
    with suppress(BaseException):
        signal.setitimer(signal.ITIMER_PROF, 0)
        with os.fdopen(writing, "wb") as stream:
            pickle.dump(answer, stream)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os._exit(1)


def limit_memory() -> tuple[int, int]:
    """Limit this process to ``MAX_BYTES`` (half of the machine's memory) more private memory.

    Without /proc (macOS, some sandboxes) nothing is limited. Return the previous (soft, hard)
    limits of ``RLIMIT_DATA`` in bytes.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return before
    now = next(
        int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData")
    )
    # A limit that the user has set stays.
    least = min([now + MAX_BYTES, *(limit for limit in before if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (least, before[1]))
    return before


@contextmanager
def limited_memory(block: str) -> Iterator[None]:
    """Limit the memory that a block adds to this process to half of the machine's memory.

    Memory of a GPU is not limited.

    Raises:
        DataError: the block takes more; the error begins with ``block``, its name.
    """
    before = limit_memory()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError if its allocator gets no memory.
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        said = f"{block} takes more than {MAX_BYTES / 1e9:,.1f} GB of memory"
        raise DataError(f"{said}. Correct it, or take another file") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` ends; exit now if it has ended (Linux).

    Nothing else would end a process in a session of its own. ``parent`` is a process id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


@cache
def end_with(launcher: int) -> None:
    """Kill this process when ``launcher`` ends, or now if it has ended; call it in a fresh process.

    Unlike Linux's parent-death signal, this works from any thread, and also if ``launcher`` is not
    the parent.

    Args:
        launcher: process id.
    """
    try:
        watched = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([watched], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
