"""Atomic replacement of files, with a flush to the disk where durability matters.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from automoe.errors import retried


def checksum(path: Path, method: Callable[[], Any] = xxhash.xxh3_128) -> str:
    """Return a checksum of a file's bytes in hexadecimal digits.

    The default, XXH3, detects damage, not intent. It reads 7 GB per second from the page cache.
    """
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, method).hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a file and flush its content.

    The file's name is on the disk only after its directory is flushed too.
    """
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str) -> None:
    """Replace a file atomically and flush it to the disk before returning; for a single writer."""
    scratch = path.with_name(f".{path.name}")
    write_durably(scratch, text)
    os.replace(scratch, path)
    flush(path.parent)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically without a flush: a reader sees all of the old or the new content.

    Several machines may write to one directory. A write that fails temporarily is repeated.
    """
    # Machines that share the directory number their processes alike.
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    raw = content.encode() if isinstance(content, str) else content

    def write() -> None:
        scratch.write_bytes(raw)
        os.replace(scratch, path)

    try:
        retried(write)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def free_name(path: Path, stem: str) -> Path:
    """Return the first unused path of ``stem.1``, ``stem.2``, ... with the suffix of ``path``.

    It is in the same folder as ``path``.
    """
    number = 1
    while os.path.lexists(free := path.with_name(f"{stem}.{number}{path.suffix}")):
        number += 1
    return free


def set_aside(path: Path, stem: str) -> str | None:
    """Rename ``path`` to ``free_name(path, stem)`` and return the new name.

    Returns:
        None if ``path`` does not exist.
    """
    if not os.path.lexists(path):
        return None
    return path.rename(free_name(path, stem)).name
