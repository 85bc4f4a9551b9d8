"""Weights of successive versions of a model in a folder: one full file, and lossless deltas.

``versions.json`` names the full file and, in order, the deltas, with the hash of each version. A
delta is the XOR of every tensor's bytes with the previous version, compressed: after one update
most bits are zero. When the deltas would outgrow a full file, the newest version is kept as the
full file, and they are deleted.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
import xxhash
from safetensors.torch import load_file

from automoe.comm.agreement import Ranks
from automoe.errors import CheckpointError
from automoe.hf.files import header_bytes, raw_bytes
from automoe.rl.weights import WeightStream, feed
from automoe.storage.files import flush, replace_durably
from automoe.storage.lock_file import take_lock
from automoe.storage.sealed import sealed, unsealed

INDEX, LOCK = "versions.json", "versions.lock"
_CODEC = "zstd"


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the hash of named tensors (names, dtypes, shapes, bytes), independent of their order."""
    return _hash([_line(name, tensor, raw_bytes(tensor)) for name, tensor in tensors.items()])


def _line(name: str, tensor: torch.Tensor, raw: np.ndarray) -> str:
    """Return a tensor's name, dtype, shape, and the hash of ``raw``: its bytes, or those of another version of it."""
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128(raw.data).hexdigest()}"


def _hash(lines: list[str]) -> str:
    return xxhash.xxh3_128("\n".join(sorted(lines)).encode()).hexdigest()


class WeightVersions:
    """Publisher of successive versions of a model's weights in ``folder``; rank 0 writes the files.

    A new version is written as a lossless delta to the previous one; a full copy of the newest
    version is kept to compute the next delta. If a process is killed at any time, the folder has
    the previous version or the new one, and the next ``publish`` continues. If the newest version
    is damaged, the next one is written in full.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks = Ranks()

    def publish(self, stream: WeightStream, step: int) -> str:
        """Write the weights of ``stream`` as a new version; return their hash. Collective.

        Args:
            stream: the current weights.
            step: training step of the weights, stored in the folder's index ``versions.json``.

        Raises:
            OSError: the folder cannot be written, or another process is publishing in it; the same
                error on every rank.
            CheckpointError: the index cannot be read.
        """
        self._ranks.lead(self._lock, again=False)
        try:
            self._ranks.lead(lambda: self._begin(stream), again=False)
            feed(stream, self._take)
            return self._ranks.lead(lambda: self._commit(step), again=False)
        finally:
            if self._ranks.rank == 0:
                os.close(self._handle)

    def _lock(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._handle = take_lock(self.folder / LOCK)

    def _begin(self, stream: WeightStream) -> None:
        self._chain = _chain(self.folder)
        header = header_bytes(stream.contents)
        self._lines: list[str] = []
        self._lines_before: list[str] = []
        self._before: np.ndarray | None = None
        self._number = self._chain[-1]["number"] + 1 if self._chain else 0
        newest = _full(self.folder, self._number - 1)
        size = len(header) + sum(stored.num_bytes for stored in stream.contents.values())
        if newest.is_file() and newest.stat().st_size == size:
            with newest.open("rb") as file:
                if file.read(len(header)) == header:
                    self._before = np.memmap(newest, mode="r", offset=len(header))
        self._at = 0
        self._new = open(_scratch(_full(self.folder, self._number)), "wb")
        self._new.write(header)
        self._zip = zipfile.ZipFile(_scratch(_difference(self.folder, self._number)), "w")

    def _take(self, bucket: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in bucket.items():
            raw = raw_bytes(tensor)
            self._lines.append(_line(name, tensor, raw))
            self._new.write(raw.data)
            if self._before is not None:
                before = self._before[self._at : self._at + len(raw)]
                self._lines_before.append(_line(name, tensor, before))
                self._zip.writestr(name, pyarrow.compress(raw ^ before, _CODEC, asbytes=True))
            self._at += len(raw)

    def _commit(self, step: int) -> str:
        """Rename the new files, write the index with ``step``, and delete files that it does not name.

        Returns the hash of the new version. If the process is killed meanwhile, the folder still
        has the old version or the new one.
        """
        self._new.close()
        self._zip.close()
        new = _full(self.folder, self._number)
        for path in (new, _difference(self.folder, self._number)):
            flush(_scratch(path))
            os.replace(_scratch(path), path)
        digest = _hash(self._lines)
        chain = [{"number": self._number, "step": step, "hash": digest}]
        files = [new]
        if self._chain and _hash(self._lines_before) == self._chain[-1]["hash"]:
            first, *later = [entry["number"] for entry in [*self._chain, *chain]]
            longer = [_full(self.folder, first), *(_difference(self.folder, n) for n in later)]
            sizes = [path.stat().st_size for path in longer if path.is_file()]
            if len(sizes) == len(longer) and sum(sizes[1:]) < self._at:
                chain, files = [*self._chain, *chain], [new, *longer]
        replace_durably(self.folder / INDEX, sealed({"chain": chain}))
        for path in {*self.folder.iterdir()}.difference(files):
            if path.name.removeprefix(".").startswith(("weights-", "difference-")):
                path.unlink()
        return digest


def read_version(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, number: int | None = None
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (version number, tensors by name) of the newest version in ``folder``.

    Args:
        folder: folder that ``WeightVersions`` writes.
        tensors: CPU tensors of an older version, updated in place if the folder has all deltas
            since that version; None: read the full file first.
        number: version number of ``tensors``.

    Raises:
        CheckpointError: the folder has no version, a file cannot be read, or the hash of the result
            is not the published one.
    """
    while True:
        if not (chain := _chain(folder)):
            raise CheckpointError(f"{folder} has no {INDEX}: nothing was published there")
        try:
            return _read(folder, chain, tensors, number)
        except Exception as error:  # whatever a damaged file makes its reader raise
            if _chain(folder) == chain:
                raise CheckpointError(
                    f"{folder}: version {chain[-1]['number']} cannot be read: {type(error).__name__}: {error}. "
                    "Remove the folder: the next version is then written in full. Or the tensors to go on from are of "
                    "another model: give none"
                ) from error
        tensors = None  # half changed, while the files were replaced by those of a later version


def _read(
    folder: Path,
    chain: list[dict[str, Any]],
    tensors: dict[str, torch.Tensor] | None,
    number: int | None,
) -> tuple[int, dict[str, torch.Tensor]]:
    numbers = [entry["number"] for entry in chain]
    if tensors is None or number not in numbers:
        tensors, number = load_file(_full(folder, numbers[0])), numbers[0]
    for later in numbers[numbers.index(number) + 1 :]:
        with zipfile.ZipFile(_difference(folder, later)) as changes:  # checks a CRC of each member
            for name, tensor in tensors.items():
                raw = tensor.view(-1).view(torch.uint8).numpy()
                changed = pyarrow.decompress(changes.read(name), len(raw), _CODEC)
                np.bitwise_xor(raw, np.frombuffer(changed, np.uint8), out=raw)
    if (digest := hash_of(tensors)) != chain[-1]["hash"]:
        raise ValueError(f"it has the hash {digest}, and {chain[-1]['hash']} was published")
    return numbers[-1], tensors


def _chain(folder: Path) -> list[dict[str, Any]]:
    """Return number, step and hash of each version in the folder's index; [] without an index.

    Raises:
        CheckpointError: the index cannot be read.
    """
    file = folder / INDEX
    if not file.is_file():
        return []
    try:
        if chain := unsealed(file.read_bytes())["chain"]:
            return chain
        raise ValueError("its chain is empty")
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}). Remove the folder: the next version is then written in full"
        ) from None


def _full(folder: Path, number: int) -> Path:
    return folder / f"weights-{number:08d}.safetensors"


def _difference(folder: Path, number: int) -> Path:
    return folder / f"difference-{number:08d}.zip"


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}")
