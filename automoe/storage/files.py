"""Files that are replaced in one step, and flushed to the disk where that is asked for. Nothing
here imports torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from automoe.errors import retried


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a file and flush its content; its name is on the disk once its directory is flushed
    too."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str) -> None:
    """Replace a file in one step that has reached the disk when this returns; for a single
    writer."""
    scratch = path.with_name(f".{path.name}")
    write_durably(scratch, text)
    os.replace(scratch, path)
    flush(path.parent)


def replace_file(path: Path, text: str) -> None:
    """Replace a file in one step, without a flush: a reader sees the old content or the new one, in
    full.

    Several machines may write to one directory. A write that fails for a moment is repeated.
    """
    # Machines that share the directory number their processes alike.
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")

    def write() -> None:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)

    try:
        retried(write)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def set_aside(path: Path, stem: str) -> str | None:
    """Rename ``path`` to the first free name of ``stem.1``, ``stem.2``, ... and return it; None if
    nothing is there."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(target := path.with_name(f"{stem}.{number}")):
        number += 1
    path.rename(target)
    return target.name
