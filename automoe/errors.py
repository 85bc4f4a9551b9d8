"""Errors that a user can fix, and their output: a message says the fault, the rule and a remedy."""

from __future__ import annotations

import copyreg
import errno
import os
import re
import resource
import signal
import sys
import threading
import time
import unicodedata
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from inspect import currentframe
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TextIO, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)
P = ParamSpec("P")

# Errors that a network file system or a failing disk reports briefly; a second try may succeed.
_PASSING = (errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT)
_WAITS_S = (0.1, 0.5, 2.0)
_TRIED = "tried several times"
_NO_PROCESS = ("can't start new thread", os.strerror(errno.EAGAIN))
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# EINVAL: a FIFO or a device where a file belongs (``automoe.storage.files.open_regular``).
_OF_DISK = (*FULL, errno.EIO, errno.ESTALE, errno.EROFS, errno.EINVAL, errno.EISDIR)

# The last two are 128 plus the number of SIGINT and of SIGPIPE.
EXIT_WRONG = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141


def spelled_out(text: str) -> str:
    """Return ``text`` with terminal control characters escaped, so untrusted text can be printed."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(ascii(c)[1:-1] if steers(c) else c for c in text)


def steers(char: str) -> bool:
    """Return True if printing a character could control the terminal or reverse the text direction.

    These are control characters (except newline and tab), line separators, lone surrogates,
    unassigned characters and direction marks. Characters that join emoji or letters, and spaces of
    other scripts, are harmless.
    """
    turns = unicodedata.bidirectional(char) in "LRE RLE LRO RLO PDF LRI RLI FSI PDI".split()
    steering = unicodedata.category(char) in "Cc Cs Cn Zl Zp".split()
    return turns or (steering and char not in "\n\t")


class AutomoeError(Exception):
    """Base class of errors meant for users; entry points print them without a traceback.

    A message may quote the content of files, so ``str`` escapes terminal control characters.
    """

    def __str__(self) -> str:
        return spelled_out(super().__str__())

    def __reduce__(self) -> tuple:  # pickle cannot call __init__, whose arguments are not kept
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(AutomoeError, ValueError):
    """Invalid setting or combination of settings, usually found before any rank starts.

    Args:
        key: dotted config key at fault, e.g. ``mesh.ep``.
        value: the value that was given.
        rule: the rule that the value breaks, with the rule's numbers.
        remedy: what to do; it names the nearest valid choice if one exists.
    """

    def __init__(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.key = key
        self.value = value
        self.rule = rule
        self.remedy = remedy
        setting = key if value == "" else f"{key}={value}"
        super().__init__(f"{setting}: {rule}. {remedy}")


class DataError(AutomoeError, ValueError):
    """Invalid data, such as training text or a batch of samples; the message says where it is."""


class LaunchError(AutomoeError, RuntimeError):
    """Failure to start or run ranks on this machine, or failure of a rank (the first of several)."""


class TrainingError(AutomoeError, RuntimeError):
    """Failure of a run that was started from Python by ``automoe.train(...)``.

    Args:
        message: the first error of a rank, with the output that led to it.
        run_dir: directory with the run's logs, records and checkpoints.
    """

    def __init__(self, message: str, run_dir: Path) -> None:
        super().__init__(message)
        self.run_dir = run_dir


class CheckpointError(AutomoeError, RuntimeError):
    """Checkpoint or export that is missing, incomplete or inconsistent with its own metadata."""


class SaveError(CheckpointError):
    """Failure to write a checkpoint; older checkpoints are intact, and training can continue."""


class DiskError(AutomoeError):
    """Failure of a file operation: the disk is full or broken, or the path is not a regular file."""


def in_words(error: BaseException) -> BaseException:
    """Convert an operating system error that a user can fix into an ``AutomoeError`` with a remedy.

    These are errors of disks, permissions, text that is not UTF-8, a missing working or home
    directory, and the limit of processes. Any other error is returned unchanged.
    """
    if isinstance(error, OSError) and error.errno in _OF_DISK:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "Make room there" if error.errno in FULL else "Check that disk, or that file"
        return DiskError(f"{where}{error.strerror}. {remedy}")
    if isinstance(error, PermissionError) and error.filename is not None:
        return DiskError(f"{error.filename}: {error.strerror}. Correct its permissions")
    if isinstance(error, UnicodeError):
        return DataError(
            f"a file or a prompt is not UTF-8 ({error}). Convert it (iconv -f latin1 -t utf-8)"
        )
    if isinstance(error, FileNotFoundError) and error.filename is None:  # os.getcwd raises it so
        return LaunchError("the working directory is gone. Change to one that exists")
    text = str(error)
    if text.startswith("Could not determine home"):
        problem = "this user has no home directory"
        return LaunchError(
            f"{problem}. Set HOME, or XDG_CACHE_HOME for the cache of tokenised text"
        )
    if text.endswith(_NO_PROCESS):
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        return LaunchError(
            f"no further process or thread can be started ({error}): this user may have {limit} (ulimit -u), or the "
            "container has its limit. Raise it, end other processes, or start fewer ranks"
        )
    return error


class BackendError(AutomoeError, RuntimeError):
    """Backend, package or device that is missing here or fails; the message says what to do."""


def say(text: object) -> None:
    """Print ``text`` on standard error, at once: standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def exit_status(command: Callable[P, int]) -> Callable[P, int]:
    """Decorate an entry point so that errors and Ctrl-C become exit statuses.

    The decorated function returns the status of ``command``; 2 after an ``AutomoeError``, whose
    message is printed, or if standard output cannot be written; 130 after Ctrl-C; 141 if the reader
    of standard output has closed it (``automoe ... | head -1``).

    Modules that are slow to import should be imported inside ``command``: Ctrl-C during the import
    then prints no traceback, even if the module turns ``KeyboardInterrupt`` into another error.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        outermost = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        outermost &= threading.current_thread() is threading.main_thread()
        if outermost:
            signal.signal(signal.SIGINT, _interrupt)
        sys.stdout, sys.stderr = show_everything(sys.stdout), show_everything(sys.stderr)
        try:
            try:
                with without("kernels"):
                    status = command(*args, **kwargs)
            except SystemExit:  # argparse raises it after --help
                _flush()
                raise
            _flush()  # an error in a flush at interpreter exit could no longer be handled
            return status
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except Exception as error:
            if _interrupted:
                return EXIT_INTERRUPTED
            if isinstance(error, OSError) and error.filename is None:
                if (lost := _lost_output()) is not None:
                    return lost
            said = in_words(error)
            if not isinstance(said, AutomoeError):
                raise
            say(f"error: {said}")
            return EXIT_WRONG
        finally:
            if outermost:
                _interrupted.clear()
                signal.signal(signal.SIGINT, signal.default_int_handler)

    return run


class Shown:
    """Wrapper of standard output or error that escapes terminal control characters.

    It does so for automoe's own output, which may quote a user's file names and settings. Colours
    that the package rich writes to a terminal are kept, and output of other packages is unchanged.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Not by ``reconfigure``, which fails where a file's descriptor has become a pipe's.
        strict = getattr(stream, "errors", None) in ("strict", "surrogateescape")
        self._encoding = stream.encoding if strict else None

    def write(self, text: str) -> int:
        if self._encoding:
            text = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
        frame: Any = currentframe()
        while frame and frame.f_code.co_name == "write":  # of this stream, or one around it
            frame = frame.f_back
        printer = (frame.f_globals.get("__name__") or "").partition(".")[0] if frame else ""
        if printer in ("automoe", "__main__", "argparse"):
            text = spelled_out(text)
        elif printer == "rich" and not self._stream.isatty():
            text = spelled_out(text)
        elif printer == "rich" and self._stream is not sys.__stderr__:  # where bars move the cursor
            parts = re.split(r"(\x1b\[[0-9;]*m)", text)
            text = "".join(part if i % 2 else spelled_out(part) for i, part in enumerate(parts))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def show_everything(stream: Any) -> Any:
    r"""Return a wrapper of a text stream that prints ``\uXXXX`` for characters its encoding lacks.

    Without the wrapper, such a character raises an error under ``PYTHONIOENCODING=ascii`` or
    ``LC_ALL=C``. The wrapper also escapes terminal control characters.
    """
    return stream if stream is None or isinstance(stream, Shown) else Shown(stream)


def _flush() -> None:
    if sys.stdout is not None:  # Python sets None if the process starts with stdout closed
        sys.stdout.flush()


def _lost_output() -> int | None:
    """Return the exit status if standard output or error can no longer be written, else None.

    It is 141 if the reader closed the stream, else 2. To find out, a line end is written to
    standard output. A stream that fails is redirected to the null device.
    """
    lost = None
    for stream, end in ((sys.stdout, "\n"), (sys.stderr, "")):
        try:
            print(end=end, file=stream, flush=True)
        except OSError as error:
            # The interpreter flushes the stream again at exit, so it needs a valid descriptor.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            lost = lost or error
    if lost is None:
        return None
    if lost.errno == errno.EPIPE:
        return EXIT_NO_READER
    say(f"error: standard output: {lost.strerror}")
    return EXIT_WRONG


_interrupted: list[int] = []


def _interrupt(signum: int, frame: object) -> None:
    _interrupted.append(signum)
    raise KeyboardInterrupt


def number_option(
    convert: Callable[[str], N], is_valid: Callable[[N], bool], kind: str
) -> Callable[[str], N]:
    """Return a function for argparse's ``type=`` that converts an option to a number and checks it.

    Args:
        convert: ``int`` or ``float``.
        is_valid: returns False for numbers that the option does not allow.
        kind: noun for the allowed numbers in the message ``TEXT is not a {kind}``.
    """

    def parse(text: str) -> N:
        with suppress(ValueError, OSError):
            if is_valid(number := convert(text)):
                return number
        raise ArgumentTypeError(f"{text} is not a {kind}")

    return parse


_hidden: set[str] = set()  # packages that ``without`` hides


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Hide installed packages from imports within a ``with`` block, as if they were missing.

    Packages that are already imported stay visible. It is used to hide ``kernels``, through which
    transformers and bitsandbytes would download compiled code from the Hub.
    """
    modules: dict[str, Any] = sys.modules  # None makes an import fail, and find_spec find nothing
    hidden = [name for name in packages if name not in modules]
    modules.update(dict.fromkeys(hidden))
    _hidden.update(hidden)
    try:
        yield
    finally:
        _hidden.difference_update(hidden)
        for name in hidden:
            if modules.get(name) is None:
                modules.pop(name, None)


def import_backend(module: str, choice: str, remedy: str) -> ModuleType:
    """Import and return a module of an optional package.

    Args:
        module: dotted name of the module.
        choice: the setting that needs the module, e.g. ``moe.experts=te``.
        remedy: sentence that says what to install, or what to set instead.

    Raises:
        BackendError: the module cannot be imported.
    """
    package = module.partition(".")[0]
    if package in _hidden and sys.modules.get(package, package) is None:
        del sys.modules[package]
    try:
        with without("kernels"):
            return import_module(module)
    # Without CUDA, its driver or a library, some packages raise RuntimeError, OSError and others.
    except Exception as error:
        raise BackendError(
            f"{choice}: {module} does not import ({type(error).__name__}: {error}). {remedy}"
        ) from error


def listed(names: Iterable[object], shown: int = 4) -> str:
    """Sort names and return at most ``shown`` of them as text: ``a, b, c, d and 12 more``."""
    texts = sorted(map(str, names))
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return ", ".join(texts[:shown]) + more


def one_line(text: object) -> str:
    """Return ``text`` on one line, its runs of whitespace as single spaces, cut after 400 characters."""
    return " ".join(str(text).split())[:400]


def retried(action: Callable[[], T]) -> T:
    """Call ``action`` and return its result; repeat it up to three times after a transient error.

    Transient errors are EIO, ESTALE, EINTR, EAGAIN and ETIMEDOUT. The repeats wait 0.1, 0.5 and 2 s
    and print a warning.

    Do not use this for a bare ``fsync``: Linux reports only once that pages could not be written,
    and then forgets the error. Write the data again instead.

    Raises:
        OSError: any other error at once, or a transient one at the last try.
    """
    for wait in _WAITS_S:
        try:
            return action()
        except OSError as error:
            if error.errno not in _PASSING or _TRIED in getattr(error, "__notes__", ()):
                raise
            where = f"{error.filename}: " if error.filename else ""
            print(f"warning: {where}{error.strerror}; trying again in {wait} s", flush=True)
            time.sleep(wait)
    try:
        return action()
    except OSError as error:
        error.add_note(_TRIED)  # so that an enclosing ``retried`` does not start over
        raise
