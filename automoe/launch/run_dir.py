"""The run directory's lock, status and error files, which ranks, launcher and user share.

``status.json`` has ``state`` (starting, running, done, failed, preempted), ``objective`` (last
validation loss, else training loss), ``error`` (rank, type, message, traceback), ``pid``, and
``failed_attempts`` if the launcher may restart the run. The state "failed" is final, and the first
error wins: those of other ranks follow from it (a peer vanished from a collective).
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from automoe.checkpoint.steps import FOLDER, committed_steps
from automoe.config.frozen import CONFIG_FILE, describe, differences, flat, goes_on, read_mapping
from automoe.config.schema import Config
from automoe.errors import FULL, AutomoeError, ConfigError, LaunchError, in_words, say
from automoe.storage.files import named, read_file, wrong_kind
from automoe.storage.foreign import parse_json
from automoe.storage.lock_file import take_lock
from automoe.storage.sealed import read_json, replace_json, sealed

State = Literal["starting", "running", "done", "failed", "preempted"]

STATUS_FILE = "status.json"
ERROR_FILE = "first_error.json"
STUCK_FILE = "stuck"  # exists while a rank asks all ranks for their positions
LOCK_FILE = ".lock"
LOG_FOLDER = "logs"
SWEEP_FILE = "sweep.json"
# Error reports leave out the frames between the start of a rank and the recipe.
_LOADERS = ("automoe/launch/worker.py", "automoe/config/shipped.py")
_IMPORTS = ("<frozen importlib", os.path.dirname(importlib.__file__) + os.sep)


@contextmanager
def locked(run_dir: Path) -> Iterator[Callable[[], str | None]]:
    """Lock ``run_dir`` for one run; the kernel releases the lock when the holder dies.

    Yields:
        A function that returns an error message if ``run_dir`` was removed or replaced after it was
        locked, else None.

    Raises:
        ConfigError: the directory cannot be created or written.
        LaunchError: another run holds the lock; the message has its process id.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = take_lock(run_dir / LOCK_FILE)
        # While this descriptor is open, no other folder can get this folder's inode number.
        folder = os.open(run_dir, os.O_DIRECTORY)
    except BlockingIOError as held:
        raise LaunchError(
            f"run_dir={run_dir} is in use by another run, process {held.strerror}. "
            "Set another run_dir, or wait for that run to end"
        ) from None
    except OSError as error:
        raise ConfigError(
            "run_dir",
            run_dir,
            f"cannot be written: {error.strerror} ({error.filename})",
            "Name a directory that can be written",
        ) from None

    def lost() -> str | None:
        try:
            if os.path.samestat(os.stat(run_dir), os.fstat(folder)):
                return None
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a network file system may be unreachable for a moment
            return None
        return f"run_dir={run_dir} was removed or replaced while the run was under way; what it wrote there is lost"

    try:
        yield lost
    finally:
        os.close(handle)
        os.close(folder)


def check_same_run(run_dir: Path, config: Config) -> list[str]:
    """Raise unless ``run_dir`` is free or holds the run of ``config``; return notes on changes.

    The notes name settings that differ from the earlier start of the run and are allowed to. With
    ``checkpoint.resume=never`` settings are not compared.

    Args:
        config: configuration with nothing left to derive, from ``automoe.config.frozen.resolved``.

    Raises:
        ConfigError: a setting differs that may not, the earlier run's files cannot be read, the
            directory holds a sweep, or the run to resume from has another ``data.kind``.
    """
    if (run_dir / SWEEP_FILE).exists():
        raise ConfigError(
            "run_dir", run_dir, f"holds a sweep ({SWEEP_FILE})", "Name another run_dir"
        )
    metrics = run_dir / "metrics.jsonl"
    saved = any(run_dir.glob("checkpoints/step-*"))
    try:
        done = read_status(run_dir).get("state") == "done"
    except (OSError, ValueError):
        done = True  # an unreadable status may be that of a finished run
    used = done or saved or (metrics.is_file() and metrics.stat().st_size)
    if not saved:
        _check_source(config)
    if not used or config.checkpoint.resume == "never":
        return []
    over = (
        "start over here with checkpoint.resume=never, which sets its checkpoints and metrics aside"
    )
    try:
        changed = differences(read_config(run_dir), config)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "run_dir",
            run_dir,
            f"holds a run, and {CONFIG_FILE} does not say whether it is this one: {error}",
            f"Restore that file, name another run_dir, or {over}",
        ) from None
    # The newest checkpoint may be another run's, if a start over ended before it set the old
    # checkpoints aside.
    newest = _newest_config(run_dir)
    held = (differences(newest, config) if newest else {}) | changed
    may = {key for key, both in held.items() if goes_on(key, *both) and (saved or not done)}
    if refused := {key: both for key, both in held.items() if key not in may}:
        differing = (
            "holds a run with other settings"
            if saved or not done
            else "holds a finished run and no checkpoint of it"
        )
        raise ConfigError(
            "run_dir",
            run_dir,
            f"{differing}: {describe(refused)}",
            "Set them back, name another run_dir (checkpoint.resume=DIR begins it from a checkpoint of the same model, "
            f"data and length), or {over}",
        )
    return [f"note: unlike the last start in {run_dir}: {describe(changed)}"] if changed else []


def _check_source(config: Config) -> None:
    """Raise ``ConfigError`` if the run at ``checkpoint.resume`` has another ``data.kind``."""
    source = Path(config.checkpoint.resume).expanduser()
    then = _newest_config(source.parent.parent if source.name.startswith("step-") else source)
    kind = flat(then or {}).get("data.kind", config.data.kind)
    if kind != config.data.kind and not config.data.sources:
        raise ConfigError(
            "checkpoint.resume",
            source,
            f"a run goes on with the rows of its checkpoint, whose data.kind is {kind} and not {config.data.kind}",
            "Begin from its weights: automoe export RUN --out DIR, then model.hf_path=DIR",
        )


def _newest_config(run_dir: Path) -> dict[str, Any] | None:
    """Return the configuration stored in the newest checkpoint of ``run_dir``, as dictionaries.

    None if there is no checkpoint, or it cannot be read.
    """
    folder = run_dir / FOLDER
    try:
        newest = committed_steps(folder)[-1]
        return dict(parse_json(read_file(folder / newest / "manifest.json"))["config"])
    # The run that continues from this checkpoint reports what is wrong with it.
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return ``config.yaml`` as nested dictionaries, unchecked: any version may have written it.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    return read_mapping(read_file(run_dir / CONFIG_FILE))


def start_run(run_dir: Path) -> None:
    """Delete an earlier run's outcome and logs, and write the state ``starting``.

    Checkpoints and metrics stay.

    Raises:
        ConfigError: a folder is where a file belongs, or a file where the folder of logs belongs;
            nothing was deleted.
    """
    logs = run_dir / LOG_FOLDER
    if logs.exists() and not logs.is_dir():
        raise ConfigError(
            "run_dir", run_dir, f"{logs} is a file, where a folder belongs", "Move it away"
        )
    logs.mkdir(exist_ok=True)
    # The earlier run may have had more ranks.
    old = [run_dir / ERROR_FILE, run_dir / STUCK_FILE, *logs.glob("rank*")]
    for path in (run_dir / STATUS_FILE, run_dir / CONFIG_FILE, *old):
        if (kind := wrong_kind(path)) is not None:
            raise ConfigError(
                "run_dir", run_dir, f"{path} is {kind}, where a file belongs", "Move it away"
            )
    for path in old:
        path.unlink(missing_ok=True)
    for path in logs.glob("attempt-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_status(run_dir, "starting", pid=os.getpid())


def start_again(run_dir: Path, attempt: int) -> None:
    """Move logs and error report of attempt number N, ``attempt``, to ``logs/attempt-N``.

    Then write the state ``starting``. Logs that cannot be moved are written over.
    """
    logs = run_dir / LOG_FOLDER
    aside = logs / f"attempt-{attempt}"
    with telling():
        aside.mkdir(parents=True)  # logs may have been removed
        for path in (*logs.glob("rank*"), run_dir / ERROR_FILE):
            if path.exists():
                path.rename(aside / path.name)
    for name in (ERROR_FILE, STUCK_FILE):
        (run_dir / name).unlink(missing_ok=True)
    with telling():
        write_status(run_dir, "starting", pid=os.getpid())


@contextmanager
def telling() -> Iterator[None]:
    """Context manager that turns an ``OSError`` or ``ValueError`` of its body into a warning on stderr.

    The body writes or reads ``status.json``, whose loss must not end the run.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        say(f"warning: {STATUS_FILE}: {in_words(error)}")


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """Return the content of ``status.json``; {} before the first run.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    path = Path(run_dir) / STATUS_FILE
    return read_json(path) if path.is_file() else {}


def write_status(run_dir: Path, state: State, **facts: Any) -> None:
    """Replace ``status.json`` atomically, or on a full disk in place.

    Once a failure is recorded, calls with another state than ``failed`` or ``starting`` do nothing.

    Args:
        state: starting, running, done, failed or preempted.
        facts: further entries of the file, such as ``objective``.
    """
    yields = state not in ("failed", "starting")
    if yields and (run_dir / ERROR_FILE).exists():
        return
    content = {"state": state, "time": time.time(), **facts}
    path = run_dir / STATUS_FILE
    try:
        replace_json(path, content)
    except OSError as error:
        if error.errno not in FULL or not _overwrite(path, content):
            raise
    if yields and (failure := read_failure(run_dir)) is not None:  # a rank failed meanwhile
        write_status(run_dir, "failed", error=failure)


def _overwrite(path: Path, content: dict[str, Any]) -> bool:
    """Overwrite a JSON file in place, which a full disk allows; tracebacks are left out.

    Returns:
        False, and nothing is written, if ``content`` needs more disk blocks than the file has.
    """
    if error := content.get("error"):
        content["error"] = error | {"traceback": []}
    raw = f"{sealed(content, indent=1)}\n".encode()
    with suppress(OSError), path.open("r+b", buffering=0) as file:
        if len(raw) <= os.fstat(file.fileno()).st_blocks * 512:
            file.truncate(file.write(raw))
            return True
    return False


def read_failure(run_dir: Path) -> dict[str, Any] | None:
    """Return the report of the run's first error from ``first_error.json``.

    None if the file is missing or damaged.
    """
    try:
        return parse_json(read_file(run_dir / ERROR_FILE))
    except (OSError, ValueError):
        return None


def error_report(error: BaseException, rank: int | None) -> dict[str, Any]:
    """Return a dictionary that describes ``error``, as ``status.json`` stores it.

    Its keys are ``rank``, ``type``, ``message``, ``for_user`` (True if a user needs no traceback)
    and ``traceback`` (a list of lines; empty if ``error`` was never raised).

    Args:
        rank: rank that failed; None if the launcher did.
    """
    lines = [
        f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not (frame.filename.endswith(_LOADERS) or frame.filename.startswith(_IMPORTS))
    ]
    message = str(error)
    if isinstance(error, SyntaxError):  # the file was never run, so it has no frame
        message = error.msg
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
    return {
        "rank": rank,
        "type": type(error).__name__,
        "message": message,
        "for_user": isinstance(error, AutomoeError),
        "traceback": lines,
    }


def record_failure(run_dir: Path, report: dict[str, Any], overrule: bool = False) -> bool:
    """Write ``first_error.json`` and the state ``failed`` unless another failure came first.

    Args:
        report: description of the error, from ``error_report``.
        overrule: replace the report of another failure.

    Returns:
        True if the report was written.

    Raises:
        OSError: ``first_error.json`` cannot be written; the state is ``failed`` all the same.
    """
    target = run_dir / ERROR_FILE
    if overrule:
        target.unlink(missing_ok=True)
    raw = json.dumps(report).encode()
    try:
        with named(target, len(raw)):
            # O_EXCL lets exactly one rank create the file.
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
    except FileExistsError:
        return False
    except OSError:
        write_status(run_dir, "failed", error=report)
        raise
    write_status(run_dir, "failed", error=report)
    return True


def show_report(run_dir: str | Path) -> None:
    """Write the HTML report of a run that ended, and print its path."""
    from automoe.observe.report import write_report

    if (report := write_report(run_dir)) is not None:
        print(f"report {report}", flush=True)


def describe_error(report: dict[str, Any]) -> str:
    """Return an error's report as text for a terminal: rank, type, message and some frames.

    Frames in installed libraries are left out, except the last one.
    """
    where = "" if report["rank"] is None else f"rank {report['rank']}: "
    text = f"{where}{report['type']}: {report['message']}"
    if not report["for_user"]:
        frames = report["traceback"]
        ours = [frame for frame in frames if "site-packages" not in frame]
        # The first frame is the recipe's; the last one may be in an installed library.
        library = [frame for frame in frames[-1:] if frame not in ours]
        text += "".join(f"\n    {frame}" for frame in ours[:1] + ours[1:][-4:] + library)
    return text
