"""Lock files. The kernel releases a lock when its holder dies, however it dies."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_lock(path: Path) -> int:
    """Return a descriptor of the lock file ``path`` for ``flock``; make the file if missing.

    Raises:
        OSError: the file cannot be made. The path may be no regular file, or a link: a link is not
            followed, because its target would be written to.
    """
    try:
        # Not inherited by children (PEP 446): a stray rank must not keep the lock.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP, "a lock file that is a link is not followed: remove it", str(path)
        ) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "a lock file that is no file: remove it", str(path))
    return handle
