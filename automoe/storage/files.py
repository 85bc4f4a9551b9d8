"""Atomic replacement of files, with a flush to the disk where durability matters.

This module does not import torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from automoe.errors import FULL, retried

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: None,
}


def wrong_kind(mode: int) -> str | None:
    """Return what a file's ``st_mode`` says it is, such as "a FIFO"; None for a regular file."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file of the program's own state, and return a descriptor; never waits.

    Opening a FIFO would wait for its other end, and reading from a device might not end.

    Raises:
        OSError: the file cannot be opened, or something else has its name.
    """
    with suppress(FileNotFoundError):
        # The kind is checked before the file is opened: opening some devices has effects.
        _check_kind(path, os.stat(path).st_mode)
    handle = os.open(path, flags | os.O_NONBLOCK, 0o644)
    try:
        _check_kind(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if (kind := wrong_kind(mode)) is not None:
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"it is {kind}, where a file belongs", str(path))


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file of the program's own state. Raises as ``open_regular``."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


@contextmanager
def named(path: Path, size: int) -> Iterator[None]:
    """Name ``path`` in an ``OSError`` of the body, and say how much room a full disk lacks.

    Args:
        size: bytes that the body writes.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in FULL:
            with suppress(OSError):
                disk = os.statvfs(path.parent)
                free = disk.f_bavail * disk.f_frsize
                why += (
                    f" ({size:,} bytes to write, {free:,} bytes and {disk.f_favail:,} files free)"
                )
        raise OSError(error.errno, why, str(path)) from error


def checksum(path: Path, method: Callable[[], Any] = xxhash.xxh3_128) -> str:
    """Return a checksum of a file's bytes in hexadecimal digits.

    The default, XXH3, detects damage, not intent. It reads 7 GB per second from the page cache.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
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
    raw = text.encode()
    with named(path, len(raw)):
        _write(path, raw, flushed=True)


def replace_durably(path: Path, text: str) -> None:
    """Replace a file atomically and flush it to the disk before returning; for a single writer."""
    raw = text.encode()
    scratch = path.with_name(f".{path.name}")
    with named(path, len(raw)):
        _write(scratch, raw, flushed=True)
        os.replace(scratch, path)
        flush(path.parent)


def _write(path: Path, raw: bytes, flushed: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(open_regular(path, flags), "wb", buffering=0) as file:
        rest = memoryview(raw)
        while rest:
            rest = rest[file.write(rest) :]
        if flushed:
            os.fsync(file.fileno())


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically without a flush: a reader sees all of the old or the new content.

    Several machines may write to one directory. A write that fails temporarily is repeated.
    """
    # Machines that share the directory number their processes alike.
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    raw = content.encode() if isinstance(content, str) else content

    def write() -> None:
        with named(path, len(raw)):
            _write(scratch, raw, flushed=False)
            os.replace(scratch, path)

    try:
        retried(write)
    except OSError:
        with suppress(OSError):
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
