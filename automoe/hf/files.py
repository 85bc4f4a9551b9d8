"""The safetensors files of a checkpoint directory: which tensor lies where, found from headers alone. No torch.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range) and the
tensors' bytes: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from automoe.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LFS_MARK = b"version https://git-lfs.github.com"


class StoredTensor(NamedTuple):
    """Where one tensor lies: file name, dtype as safetensors spells it (``BF16``), shape, its bytes in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def listed(names: Iterable[str], shown: int = 4) -> str:
    """``a, b, c, d and 12 more``."""
    names = sorted(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def read_headers(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory, from its index and the headers of its files.

    Raises:
        CheckpointError: no safetensors there, a file of the index is missing, truncated, a Git LFS
            pointer or no safetensors file, or does not hold what the index says.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory. Name a HuggingFace checkpoint directory")
    index = _read_index(folder)
    files = sorted(set(index.values())) if index is not None else [SINGLE_FILE]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        if index is None:
            there = listed(entry.name for entry in folder.iterdir()) or "nothing"
            raise CheckpointError(
                f"{folder}: neither {INDEX_FILE} nor {SINGLE_FILE} is there, only {there}. "
                "Name a directory with safetensors files"
            )
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(files)} files that {INDEX_FILE} names are missing: "
            f"{listed(missing)}. Copy them again"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(_read_header(folder / file))
    if index is not None and (lost := [name for name in index if name not in tensors]):
        raise CheckpointError(
            f"{folder}: {len(lost)} tensors that {INDEX_FILE} names are in no file: {listed(lost)}. "
            "The index belongs to other files: copy the checkpoint again"
        )
    return tensors


def check_target(path: Path, overwrite: bool) -> None:
    """Raise ``CheckpointError`` where an export may not be written to ``path``; makes nothing."""
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists. Name another directory, or overwrite it (--overwrite)")
    if path.exists() and not (path / "config.json").is_file() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is no checkpoint directory, so it is not replaced. Name another one")


def _read_index(folder: Path) -> dict[str, str] | None:
    file = folder / INDEX_FILE
    if not file.is_file():
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        if file.read_bytes()[: len(_LFS_MARK)] == _LFS_MARK:
            raise _lfs_pointer(file) from None
        raise CheckpointError(f"{file}: no index in it ({error!r}). Copy it again") from None


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        start = stream.read(len(_LFS_MARK))
        if start == _LFS_MARK:
            raise _lfs_pointer(file)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length + 8 > size:
            raise CheckpointError(
                f"{file}: truncated or no safetensors file: {size:,} bytes, and its header alone would take "
                f"{length + 8:,}. Copy it again"
            )
        stream.seek(8)
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors, file_name, data, last = {}, file.name, 8 + length, 0
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                last = max(last, end)
                tensors[name] = StoredTensor(
                    file_name, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: no safetensors header in it ({error!r}). Copy it again") from None
    if size < data + last:
        raise CheckpointError(
            f"{file}: truncated: {size:,} bytes, and its header asks for {data + last:,}. Copy it again"
        )
    return tensors


def _lfs_pointer(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is a Git LFS pointer of {os.path.getsize(file)} bytes, not the file itself. "
        "Run `git lfs pull` in the checkpoint's directory"
    )
