"""Folders that are filled under a working name and then renamed atomically."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from automoe.storage.files import flush


def flush_folder(folder: Path) -> None:
    """Flush a folder's files and their names to the disk, those of its subfolders too."""
    for file in folder.rglob("*"):
        flush(file)
    flush(folder)


def name_folder(working: Path, path: Path) -> None:
    """Rename a flushed folder to ``path`` atomically, and flush the new name to the disk.

    If ``path`` exists, the two folders exchange names, and the caller deletes the older one, now
    called ``working``. Where the system cannot exchange names, the older folder is first renamed to
    ``.NAME.old`` and deleted at the end.
    """
    old = _old(path)
    if not path.exists():
        os.rename(working, path)
    elif not exchange(working, path):
        remove_folder(old)
        os.rename(path, old)
        try:
            os.rename(working, path)
        except OSError:
            os.rename(old, path)
            raise
    flush(path.parent)
    remove_folder(old)


def restore_folder(path: Path) -> None:
    """Rename ``.NAME.old`` back to ``path`` if ``name_folder`` was killed between two renames."""
    old = _old(path)
    if not os.path.lexists(path) and os.path.lexists(old):
        os.rename(old, path)


def exchange(first: Path, other: Path) -> bool:
    """Exchange the names of two files or folders atomically; return False if the file system cannot.

    Raises:
        OSError: the exchange is supported, and it failed.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    folder = -100  # AT_FDCWD: relative paths start at the working directory
    exchanged = 2  # RENAME_EXCHANGE
    if rename(folder, os.fsencode(first), folder, os.fsencode(other), exchanged) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(other))


def remove_folder(path: Path) -> None:
    """Delete a folder with its content, or a link to a folder, if it exists.

    Files that cannot be deleted are left without an error.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)


def _old(path: Path) -> Path:
    """Return ``.NAME.old`` beside ``path``, where ``name_folder`` keeps the replaced folder."""
    return path.with_name(f".{path.name}.old")
