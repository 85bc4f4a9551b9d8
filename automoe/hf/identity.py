"""Which checkpoint a directory holds, told without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from automoe.errors import CheckpointError
from automoe.hf.headers import read_headers

SAMPLE_BYTES = 256  # of each tensor


def checkpoint_identity(path: str | Path) -> str:
    """A digest of every tensor's name, dtype, shape and first bytes: where it lies, and in which files, is not in it.

    Two fine-tunes of one model differ in nearly every tensor, and so in its first bytes.

    Raises:
        CheckpointError: as ``read_headers``, or a file cannot be read.
    """
    folder, digest = Path(path).expanduser(), hashlib.sha256()
    tensors = read_headers(folder)
    samples: dict[str, bytes] = {}
    try:
        for file in sorted({stored.file for stored in tensors.values()}):
            with (folder / file).open("rb") as stream:
                for name, stored in tensors.items():
                    if stored.file == file:
                        stream.seek(stored.start)
                        samples[name] = stream.read(min(SAMPLE_BYTES, stored.num_bytes))
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}. Make it readable") from None
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        digest.update(samples[name])
    return digest.hexdigest()
