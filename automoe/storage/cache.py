"""Cache folders of tokenised text, shared by a machine's processes and verified when opened."""

from __future__ import annotations

import glob
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from automoe.errors import DataError, say
from automoe.storage.files import checksum
from automoe.storage.folder import flush_folder, remove_folder
from automoe.storage.lock_file import take_lock
from automoe.storage.sealed import read_json, replace_json

_META = "meta.json"


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/automoe``, or ``~/.cache/automoe``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "automoe"


def open_entry(entry: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the values stored with a cache entry (a folder), verified; make the entry if missing.

    One process of a machine writes, and the others wait for it. A rename makes the entry visible
    completely or not at all. The system releases the lock of a writer that dies. An entry that is
    damaged, or was renamed since it was made, is made anew, and a line on standard error says so.

    Args:
        entry: folder of the entry; its name identifies the content.
        write: function that fills an empty folder, and returns JSON values to store.

    Raises:
        DataError: the cache cannot be read or written, or the process that writes the entry makes
            no progress. Errors of ``write`` pass through.
    """
    try:
        verified = _verified(entry)
    except OSError as error:  # An unreadable entry may be intact.
        raise DataError(
            f"{error.filename or entry}: cannot be read ({error.strerror}). Check this disk."
        ) from error
    if isinstance(verified, dict):
        return verified
    failed = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_name(f"{entry.name}.lock")
        with os.fdopen(take_lock(lock, lambda: _written(entry)), "r+"):
            verified = _verified(entry)  # another process may have been faster
            if isinstance(verified, dict):
                return verified
            here = f"{entry.name}.{socket.gethostname()}."
            # what writers of this machine left that were killed
            for left in entry.parent.glob(f"{glob.escape(here)}*"):
                remove_folder(left)
            with tempfile.TemporaryDirectory(prefix=here, dir=entry.parent) as scratch:
                if verified is not None:
                    say(f"note: {entry} is damaged ({verified}), so the text is tokenised again")
                    os.rename(entry, Path(scratch) / "damaged")
                new = Path(scratch) / "new"
                new.mkdir()
                facts = write(new)
                files = {path.name: checksum(path) for path in sorted(new.iterdir())}
                replace_json(new / _META, {"entry": entry.name, "facts": facts, "files": files})
                flush_folder(new)
                # Not name_folder, which replaces a folder: if another machine made the entry, its
                # ranks may have mapped the files already, so this rename has to fail.
                os.rename(new, entry)
    except OSError as error:
        failed = error
    verified = _verified(entry)  # another machine on a shared file system may have been faster
    if isinstance(verified, dict):
        return verified
    if failed is not None:
        raise DataError(
            f"{entry.parent}: the tokenised corpus cannot be written here ({failed.strerror}). Make room or make it "
            f"writable, or set XDG_CACHE_HOME to a directory that is."
        ) from failed
    raise DataError(
        f"{entry}: the entry just written reads back differently ({verified}). Check this disk."
    )


def _written(entry: Path) -> int:
    """Return how many bytes another process has written of a new ``entry``; -1 if a file vanishes."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in entry.parent.glob(f"{entry.name}.*/new/*"))
    return -1


def _verified(entry: Path) -> dict[str, Any] | str | None:
    """Return the dictionary stored with a cache entry, or text on its damage; None without an entry.

    Raises:
        OSError: the entry cannot be read.
    """
    if not os.path.lexists(entry):
        return None
    try:
        content = read_json(entry / _META)
        if content["entry"] != entry.name:
            return f"it was made as {content['entry']}"
        changed = [
            name for name, stored in content["files"].items() if checksum(entry / name) != stored
        ]
        return f"{', '.join(changed)}: another checksum" if changed else content["facts"]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_META}: {error}"
