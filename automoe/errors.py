"""Errors that a user can cause and mend. Each says what was wrong, where, the rule, and what to
do."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TextIO, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

# What a network file system, or a disk that reads a block at the second try, answers for a moment.
_PASSING = (errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT)
_WAITS_S = (0.1, 0.5, 2.0)

EXIT_WRONG, EXIT_INTERRUPTED, EXIT_NO_READER = 2, 130, 141  # 128 and the number of SIGINT, SIGPIPE


def spelled_out(text: str) -> str:
    """``text`` from elsewhere for a terminal: what would steer it is shown and not done."""
    return "".join(ascii(c)[1:-1] if steers(c) else c for c in text)


def steers(char: str) -> bool:
    """Whether a character steers a terminal or turns text around: controls, line separators, halves
    of a pair.

    What joins emoji or letters, and the blanks of other scripts, are text.
    """
    turns = unicodedata.bidirectional(char) in (
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    )
    return turns or (
        unicodedata.category(char) in ("Cc", "Cs", "Cn", "Zl", "Zp") and char not in "\n\t"
    )


class AutomoeError(Exception):
    """Base of every error meant for a person; entry points print it without a traceback. It may
    name what files say."""

    def __str__(self) -> str:
        return spelled_out(super().__str__())


class ConfigError(AutomoeError, ValueError):
    """A configuration that cannot run, found before any rank starts.

    Args:
        key: dotted config key at fault, e.g. ``mesh.ep``.
        value: the value that was given.
        rule: the rule it breaks, with its numbers.
        remedy: what to do, with the nearest valid choice where there is one.
    """

    def __init__(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.key, self.value, self.rule, self.remedy = key, value, rule, remedy
        given = key if value == "" else f"{key}={value}"
        super().__init__(f"{given}: {rule}. {remedy}")


class DataError(AutomoeError, ValueError):
    """Training text that cannot be read: the message names the file and the line."""


class LaunchError(AutomoeError, RuntimeError):
    """Ranks could not be started, or one of them failed; carries the first error only."""


class TrainingError(AutomoeError, RuntimeError):
    """A run that ``automoe.train`` started has not come to its end.

    Args:
        message: the first error of a rank, with the lines that led there.
        run_dir: of the run: its logs, records and checkpoints.
    """

    def __init__(self, message: str, run_dir: Path) -> None:
        super().__init__(message)
        self.run_dir = run_dir


class CheckpointError(AutomoeError, RuntimeError):
    """A checkpoint or export that is missing, incomplete or not what it says."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; older ones are as they were, and training can go on."""


class BackendError(AutomoeError, RuntimeError):
    """A backend that this machine does not have; the message names the one that it has."""


def exit_status(command: Callable[P, int]) -> Callable[P, int]:
    """Decorate an entry point, so that errors and Ctrl-C become exit statuses.

    The decorated function returns what ``command`` returns; 2 after an ``AutomoeError``, whose
    message is printed; 130 after Ctrl-C; 141 if the reader of standard output has gone (``automoe
    ... | head -1``).

    Import slow modules inside ``command``. Then Ctrl-C during an import is as quiet as later, even
    if the imported library turns the ``KeyboardInterrupt`` into an error of its own.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        outermost = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        outermost &= threading.current_thread() is threading.main_thread()
        if outermost:
            signal.signal(signal.SIGINT, _interrupt)
        show_everything(sys.stdout)
        try:
            try:
                status = command(*args, **kwargs)
            except SystemExit:  # argparse, after --help
                _flush()
                raise
            _flush()  # here, and not where the interpreter ends
            return status
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except Exception as error:
            if _interrupted:
                return EXIT_INTERRUPTED
            if (
                isinstance(error, OSError)
                and error.filename is None
                and (lost := _lost_output()) is not None
            ):
                return lost
            if not isinstance(error, AutomoeError):
                raise
            print(f"error: {error}", file=sys.stderr)
            return EXIT_WRONG
        finally:
            if outermost:
                _interrupted.clear()
                signal.signal(signal.SIGINT, signal.default_int_handler)

    return run


def show_everything(stream: TextIO) -> None:
    """Let a stream whose encoding lacks a character (``PYTHONIOENCODING=ascii``) show its number in
    its place."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    if sys.stdout is not None:  # it was closed: nothing is wanted
        sys.stdout.flush()


def _lost_output() -> int | None:
    """The status of a command whose output cannot be written any more, which is then closed; None
    where it can."""
    lost = None
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="" if stream is sys.stderr else "\n", file=stream, flush=True)
        except OSError as error:
            # the interpreter flushes again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            lost = lost or error
    if lost is None or lost.errno == errno.EPIPE:
        return None if lost is None else EXIT_NO_READER
    print(f"error: standard output: {lost.strerror}", file=sys.stderr)
    return EXIT_WRONG


_interrupted: list[int] = []


def _interrupt(signum: int, frame: object) -> None:
    _interrupted.append(signum)
    raise KeyboardInterrupt


def import_backend(module: str, choice: str, remedy: str) -> ModuleType:
    """A module of an optional package.

    Args:
        choice: the setting that needs it, e.g. ``moe.experts=te``.
        remedy: sentence that says what to install, or to set instead.

    Raises:
        BackendError: it does not import.
    """
    try:
        return import_module(module)
    # without CUDA, its driver or a library some raise RuntimeError, OSError and others
    except Exception as error:
        raise BackendError(
            f"{choice}: {module} does not import ({type(error).__name__}: {error}). {remedy}"
        ) from error


def listed(names: Iterable[object], shown: int = 4) -> str:
    """``a, b, c, d and 12 more``, sorted."""
    texts = sorted(map(str, names))
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return ", ".join(texts[:shown]) + more


def retried(action: Callable[[], T]) -> T:
    """What ``action`` returns; called again, up to three times, where a disk fails for a moment,
    each time with a line.

    Not for a bare ``fsync``: Linux says once that pages could not be written, and then forgets it.
        Write them anew.

    Raises:
        OSError: any other, or the last of these (EIO, ESTALE, EINTR, EAGAIN, ETIMEDOUT).
    """
    for wait in _WAITS_S:
        try:
            return action()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            where = f"{error.filename}: " if error.filename else ""
            print(f"warning: {where}{error.strerror}; trying again in {wait} s", flush=True)
            time.sleep(wait)
    return action()
