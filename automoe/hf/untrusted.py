"""Safe opening, parsing and copying of files in an untrusted checkpoint folder. Needs no torch.

A name must stand for a regular file in the folder. A link may lead to another file of the folder
or, in HuggingFace's cache (where ``snapshots/REVISION`` holds nothing but links), to ``blobs`` of
the same repository.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from automoe.errors import CheckpointError
from automoe.storage.files import wrong_kind

# No config.json or index comes near: that of a model with a hundred thousand tensors has 10 MB.
MAX_JSON_BYTES = 100_000_000


def is_there(folder: Path, name: str) -> bool:
    """Return True if ``name`` exists, even as a broken link; ``open_inside`` checks its kind."""
    return os.path.lexists(folder / name)


def open_inside(folder: Path, name: str) -> int:
    """Open the file ``name`` of ``folder`` for reading; never blocks, even on a FIFO.

    Returns:
        A file descriptor.

    Raises:
        CheckpointError: the name is a link out of the folder or not a regular file.
        OSError: the file does not exist or cannot be read.
    """
    try:
        real = _real_path(folder, name)
        # The kind is checked before the file is opened: opening some devices has effects.
        _check_regular(folder / name, real)
        # If the file was replaced since, a link is not followed and a FIFO does not block.
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except ValueError as error:  # a zero byte, half a surrogate pair
        raise CheckpointError(
            f"{folder}: {name!r} is no name of a file ({error}). Copy the checkpoint again"
        ) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / name)) from None
    try:
        _check_regular(folder / name, handle)
    except CheckpointError:
        os.close(handle)
        raise
    return handle


def _real_path(folder: Path, name: str) -> str:
    here = os.path.realpath(folder)
    places = [here]
    above = os.path.dirname(here)
    if os.path.basename(above) == "snapshots":
        places.append(os.path.join(os.path.dirname(above), "blobs"))
    real = os.path.realpath(os.path.join(here, name))
    if not any(real.startswith(os.path.join(place, "")) for place in places):
        raise CheckpointError(
            f"{folder / name} leads out of the checkpoint's folder, to {real}. Files are read that lie in it, or, in "
            "HuggingFace's cache, in blobs/ of the same repository. If you trust it, put the file itself there "
            "(cp -L)"
        )
    return real


def _check_regular(file: Path, opened: str | int) -> None:
    if (kind := wrong_kind(opened)) is not None:
        raise CheckpointError(f"{file} is {kind} and no file. Copy the checkpoint again")


def read_bytes(folder: Path, name: str) -> bytes:
    """Read a JSON file whole. Raises as ``open_inside``, and if it exceeds ``MAX_JSON_BYTES``."""
    with os.fdopen(open_inside(folder, name), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{folder / name} has {size:,} bytes, and at most {MAX_JSON_BYTES:,} are read. Copy the file again"
            )
        return stream.read(MAX_JSON_BYTES)


def parse_json(raw: bytes) -> Any:
    """Parse UTF-8 JSON and refuse objects with a repeated key. Raises ``ValueError``."""
    try:
        text = raw.decode("utf-8")
        found = json.loads(text)
        # Every pair that is written has a colon of its own, so nothing is lost if as many are in
        # the two upper levels. Looking at the pairs of each object, as is done otherwise, takes
        # longer than all else.
        if isinstance(found, dict):
            pairs = len(found) + sum(
                len(value) for value in found.values() if isinstance(value, dict)
            )
            if pairs == raw.count(b":"):
                return found
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested deeper than a thousand levels") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {brief(twice)} is in it twice")
    return found


def brief(value: object) -> str:
    """Shorten a value from a file to at most 80 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy one file of ``folder``. Raises as ``open_inside``."""
    with os.fdopen(open_inside(folder, name), "rb") as source, open(target, "xb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
