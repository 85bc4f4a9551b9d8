"""Folder of a checkpoint, and a digest that identifies its content independently of its path."""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from automoe.config.hub import fetch, id_and_commit, local_folder, pinned
from automoe.config.schema import Config
from automoe.hf.headers import missing_files, raw_bytes, read_headers

if TYPE_CHECKING:
    from automoe.comm.agreement import Ranks

KIND = "crc32:"  # prefix of an identity; identities of different kinds cannot be compared
THREADS = 4  # per rank; a thread reads 2 GB/s


def checkpoint_folder(spec: str | Path, key: str = "model.hf_path") -> Path:
    """Return a checkpoint's local folder; download the weights first if ``spec`` is a Hub id.

    Args:
        spec: ``OWNER/NAME[@REVISION]`` is a Hub id if no such path exists; anything else is a path,
            returned whether or not it exists.
        key: config key that names the checkpoint, for errors.

    Raises:
        ConfigError: the Hub id cannot be downloaded.
    """
    spec = pinned(key, str(spec))
    folder = local_folder(spec)
    if id_and_commit(spec) is not None and (missing := missing_files(folder)):
        fetch(key, spec, missing)
    return folder


def complete(config: Config) -> None:
    """Download the files of a run's Hub checkpoint and tokenizer that this machine's cache lacks.

    Args:
        config: configuration whose ``model.hf_path`` and ``data.tokenizer`` may be Hub ids; other
            values are ignored. With ``model.random_weights`` no weights are needed.

    Raises:
        ConfigError: a Hub id cannot be downloaded.
    """
    specs = {"model.hf_path": config.model.hf_path, "data.tokenizer": config.data.tokenizer}
    for key, spec in specs.items():
        if spec is not None and id_and_commit(spec) is not None:
            pinned(key, spec)
            if spec == config.model.hf_path and not config.model.random_weights:
                checkpoint_folder(spec)


def checkpoint_identity(path: str | Path, ranks: Ranks | None = None) -> str:
    """Return ``crc32:`` and a digest of every tensor's name, dtype, shape and CRC-32.

    The digest does not depend on the folder or on the split into files. The whole checkpoint is
    read, since another one may differ in a few rows. Collective over ``ranks``, which share the
    reading; if None, this process reads it alone.

    Raises:
        CheckpointError: files are missing or damaged, or cannot be read; every rank raises it.
    """
    from automoe.comm.agreement import Ranks  # torch

    folder = local_folder(path)
    ranks = ranks or Ranks(alone=True)
    tensors = ranks.lead(lambda: read_headers(folder))
    mine = ranks.share({name: stored.num_bytes for name, stored in tensors.items()})
    mine.sort(key=lambda name: (tensors[name].file, tensors[name].start))

    def checksum(name: str) -> int:
        value = 0
        for piece in raw_bytes(folder, tensors[name]):
            value = zlib.crc32(piece, value)
        return value

    def read() -> list[tuple[str, int]]:
        with ThreadPoolExecutor(THREADS) as pool:
            return [*zip(mine, pool.map(checksum, mine), strict=True)]

    checksums = dict(chain.from_iterable(ranks.all(read)))
    digest = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        line = f"{name} {stored.dtype} {list(stored.shape)} {checksums[name]}\n"
        digest.update(line.encode())
    return KIND + digest.hexdigest()
