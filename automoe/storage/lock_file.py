"""Lock files. The kernel releases a lock when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from automoe.storage.files import named, open_regular

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOOK_EVERY_S = 0.5


def take_lock(path: Path, look: Callable[[str], object] | None = None) -> int:
    """Lock the file ``path``, made if missing, and return the descriptor that holds the lock.

    The file then has the id of this process. If its file system has no locks, the lock is a file in
    the temporary folder of this machine, and a note says so.

    Args:
        look: called again and again with the id of the process that holds the lock, until it is
            free; it may raise to give up. None: do not wait.

    Raises:
        BlockingIOError: another process holds the lock; its id is the error's ``strerror``.
        OSError: the file cannot be made or written, is no file, or has another name as well: what
            a link leads to would be written to, and a hard link would lock two places.
    """
    while True:
        handle = _open_lock(path)
        opened = os.fstat(handle)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                os.close(handle)
                handle = _open_lock(_on_this_machine(opened))
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                note = f"note: {path}: its file system has no locks ({error.strerror}); only processes of this machine"
                print(f"{note} wait for one another", file=sys.stderr)
            with suppress(FileNotFoundError):
                # A holder may remove the file: then another process may lock a new one.
                if os.path.samestat(opened, os.stat(path)):
                    text = f"{os.getpid()}\n".encode()
                    with named(path, len(text)):
                        os.ftruncate(handle, 0)
                        os.pwrite(handle, text, 0)
                    return handle
        except BlockingIOError:
            holder = os.pread(handle, 100, 0).decode(errors="replace").strip() or "unknown"
            if look is None:
                os.close(handle)
                raise BlockingIOError(errno.EAGAIN, holder, str(path)) from None
            look(holder)
            time.sleep(_LOOK_EVERY_S)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _on_this_machine(opened: os.stat_result) -> Path:
    name = f"automoe-{os.getuid()}-{opened.st_dev}-{opened.st_ino}.lock"
    return Path(tempfile.gettempdir(), name)


def _open_lock(path: Path) -> int:
    try:
        # Not inherited by children (PEP 446): a stray rank must not keep the lock.
        handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP, "a lock file that is a link is not followed: remove it", str(path)
        ) from None
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        what = "a lock file with another name too (a hard link) locks two places: remove it"
        raise OSError(errno.EINVAL, what, str(path))
    return handle
