"""Lock files. The kernel releases a lock when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from automoe.errors import say
from automoe.storage.files import named, open_regular

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOOK_EVERY_S = 0.5
_IDLE_S = 1800.0  # longest wait for a lock's holder that makes no progress


def take_lock(path: Path, progress: Callable[[], object] | None = None) -> int:
    """Lock the file ``path``, made if missing, and return the descriptor that holds the lock.

    The id of this process is written into the file. If the file system has no locks, a file in the
    temporary folder of this machine is locked instead, and a note says so.

    Args:
        progress: function that measures the work of the process that holds the lock, for example in
            bytes written. While its result changes, this function waits; a line names that process.
            None: do not wait.

    Raises:
        BlockingIOError: ``progress`` is None, and another process holds the lock; its id is the
            error's ``strerror``.
        OSError: the file cannot be made or written, or is not a regular file; or it is a link,
            whose target would be overwritten, or has a hard link, so that two names would be
            locked; or the process that holds the lock makes no progress for half an hour.
    """
    done = None
    since = 0.0
    while isinstance(taken := _take(path), str):
        if progress is None:
            raise BlockingIOError(errno.EAGAIN, taken, str(path))
        if done is None:
            say(f"waiting for process {taken}, which holds {path}")
        if (now := progress()) != done:
            done = now
            since = time.monotonic()
        elif time.monotonic() - since > _IDLE_S:
            raise OSError(
                errno.ETIMEDOUT,
                f"process {taken} holds {path} and does nothing: end that process",
                str(path),
            )
        time.sleep(_LOOK_EVERY_S)
    return taken


_say_once = cache(say)  # a process that waits tries again and again


def _take(path: Path) -> int | str:
    """Return a descriptor that holds the lock of ``path``, or the id (text) of the process that does.

    This function does not wait. The id is ``unknown`` if the file does not state it.
    """
    handle = _open_lock(path)
    opened = os.fstat(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _say_once(
                f"note: {path}: its file system has no locks ({error.strerror}); only processes of this machine wait "
                "for one another"
            )
            name = f"automoe-{os.getuid()}-{opened.st_dev}-{opened.st_ino}.lock"
            here = _open_lock(Path(tempfile.gettempdir(), name))
            os.dup2(here, handle, inheritable=False)
            os.close(here)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A holder may have removed the file since it was opened: another process would then lock a
        # new file, so this lock protects nothing.
        if not path.exists() or not os.path.samestat(opened, os.stat(path)):
            raise BlockingIOError
        text = f"{os.getpid()}\n".encode()
        with named(path, len(text)):
            os.ftruncate(handle, 0)
            os.pwrite(handle, text, 0)
        return handle
    except BaseException as error:
        holder = os.pread(handle, 100, 0).decode(errors="replace").strip()
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise
        return holder or "unknown"


def _open_lock(path: Path) -> int:
    # What a link leads to, a hard link too, would be overwritten.
    said = "a lock file that is a link is not followed: remove it"
    if path.is_symlink():
        raise OSError(errno.ELOOP, said, str(path))
    # Not inherited by children (PEP 446): a stray rank must not keep the lock.
    handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise OSError(errno.ELOOP, said, str(path))
    return handle
