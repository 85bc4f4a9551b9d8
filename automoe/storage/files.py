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

from automoe.errors import FULL, CheckpointError, retried

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: None,
}


def wrong_kind(path: Path | str | int) -> str | None:
    """Return what a path or descriptor is, such as "a FIFO", if it is not a regular file.

    Returns None for a regular file, or if nothing has the name.
    """
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "something else")
    except FileNotFoundError:
        return None


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of automoe's own, and return a file descriptor; the call never blocks.

    Opening a FIFO would wait for its other end, and reading from a device might not end.

    Args:
        flags: flags of ``os.open``.

    Raises:
        OSError: the file cannot be opened, or it is a folder, a FIFO or a device.
    """
    if (kind := wrong_kind(path)) is not None:
        number = errno.EISDIR if kind == "a folder" else errno.EINVAL
        raise OSError(number, f"it is {kind}, where a file belongs", str(path))
    return os.open(path, flags | os.O_NONBLOCK, 0o644)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file that automoe wrote; temporary errors are retried.

    Raises:
        OSError: the file cannot be read, or is a FIFO or device; the error names the file.
    """

    def read() -> bytes:
        with named(path), os.fdopen(open_regular(path), "rb") as file:
            return file.read()

    return retried(read)


@contextmanager
def named(path: Path, size: int = 0) -> Iterator[None]:
    """Add ``path`` to an ``OSError`` of the block; on a full disk also the bytes needed and free.

    Args:
        size: bytes that the block writes; 0 if it reads.
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


@contextmanager
def explained(place: Path, remedy: str, fault: str = "") -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``CheckpointError`` that ends with ``remedy``.

    On a full disk it ends with "Make room there" instead.

    Args:
        place: file or folder for the message, if the error names none or ``fault`` is given.
        fault: what is wrong with ``place``, such as "cannot be written".
    """
    try:
        yield
    except OSError as error:
        subject = f"{place} {fault}" if fault else error.filename or place
        if error.errno in FULL:  # whatever else is wrong there, a name or permissions are not
            remedy = "Make room there"
        raise CheckpointError(f"{subject}: {error.strerror}. {remedy}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8; an ``OSError`` names the file, and on a full disk the bytes needed and free."""
    data = text.encode()
    with named(path, len(data)):
        path.write_bytes(data)


def checksum(path: Path, method: Callable[[], Any] = xxhash.xxh3_128) -> str:
    """Return a checksum of a file's bytes in hexadecimal digits.

    The default, XXH3, detects damage but not tampering. It reads 7 GB per second from the page
    cache.

    Args:
        method: constructor of a hash object like those of ``hashlib``.

    Raises:
        OSError: the file cannot be read, or is a FIFO or device.
    """

    def digest() -> str:
        with named(path), os.fdopen(open_regular(path), "rb", buffering=0) as file:
            return hashlib.file_digest(file, method).hexdigest()

    return retried(digest)


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a file and flush its content.

    The file's name reaches the disk only when its directory is flushed too.
    """
    _write(path, path, text.encode(), flushed=True)


def replace_durably(path: Path, text: str) -> None:
    """Replace a file atomically and flush it to the disk; only one process may write the file."""
    _write(path.with_name(f".{path.name}"), path, text.encode(), flushed=True)
    flush(path.parent)


def _write(scratch: Path, path: Path, raw: bytes, flushed: bool = False) -> None:
    """Write ``raw`` to the file ``scratch``, and rename that to ``path``.

    Args:
        flushed: True to flush the content to the disk before the rename.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with named(path, len(raw)):
        with os.fdopen(open_regular(scratch, flags), "wb") as file:
            file.write(raw)
            if flushed:
                file.flush()
                os.fsync(file.fileno())
        os.replace(scratch, path)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically, without a flush: a reader sees the old or the new content.

    Several machines may write to one directory. A write that fails temporarily is repeated.
    """
    # Processes on different machines that share the directory may have the same id.
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    raw = content.encode() if isinstance(content, str) else content
    try:
        retried(lambda: _write(scratch, path, raw))
    except OSError:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def free_name(path: Path, stem: str) -> Path:
    """Return the first unused path of ``stem.1``, ``stem.2``, ... in the folder of ``path``.

    The suffix of ``path`` is appended to each name.
    """
    number = 1
    while os.path.lexists(free := path.with_name(f"{stem}.{number}{path.suffix}")):
        number += 1
    return free


def set_aside(path: Path, stem: str) -> str | None:
    """Rename ``path`` to the first unused name of ``stem.1``, ``stem.2``, ... in its folder.

    The suffix of ``path`` is appended to each name.

    Returns:
        The new name; None if ``path`` does not exist.
    """
    if not os.path.lexists(path):
        return None
    return path.rename(free_name(path, stem)).name
