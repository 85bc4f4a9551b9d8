"""Which folder a checkpoint is in, and which checkpoint that is, told without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from automoe.config.schema import Config
from automoe.errors import CheckpointError
from automoe.hf.headers import missing_files, read_headers
from automoe.hub import fetch, id_and_commit, local_folder, pinned

SAMPLE_BYTES = 256  # of each tensor


def checkpoint_folder(spec: str | Path, key: str = "model.hf_path") -> Path:
    """The folder ``spec``, or that of a Hub id, whose weights are then here too.

    Raises:
        ConfigError: a Hub id that cannot be had. A path that does not exist is returned as it is.
    """
    spec = pinned(key, str(spec))
    folder = local_folder(spec)
    if id_and_commit(spec) is not None and (missing := missing_files(folder)):
        fetch(key, spec, missing)
    return folder


def complete(config: Config, weights: bool = True) -> None:
    """Download what this machine lacks of the Hub ids of a run's configuration. Raises ``ConfigError``."""
    for key, spec in (("model.hf_path", config.model.hf_path), ("data.tokenizer", config.data.tokenizer)):
        if spec is not None and id_and_commit(spec) is not None:
            pinned(key, spec)
            if weights and spec == config.model.hf_path:
                checkpoint_folder(spec)


def checkpoint_identity(path: str | Path) -> str:
    """A digest of every tensor's name, dtype, shape and first bytes: where it lies, and in which files, is not in it.

    Two fine-tunes of one model differ in nearly every tensor, and so in its first bytes.

    Raises:
        CheckpointError: as ``read_headers``, or a file cannot be read.
    """
    folder, digest = local_folder(path), hashlib.sha256()
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
