"""The safetensors format: which tensor lies where, found from headers alone; and files written tensor after tensor.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range) and the
tensors' bytes: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from automoe.errors import CheckpointError
from automoe.hf.keys import FP8_BLOCK, INDEX_FILE, SCALE_SUFFIX
from automoe.hf.quantized import quantize_fp8

SINGLE_FILE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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


# Reading ------------------------------------------------------------------------------------------


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
    if missing and index is None:
        there = listed(entry.name for entry in folder.iterdir()) or "nothing"
        raise CheckpointError(
            f"{folder}: neither {INDEX_FILE} nor {SINGLE_FILE} is there, only {there}. "
            "Name a directory with safetensors files"
        )
    if missing:
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
                shape = tuple(entry["shape"])
                tensors[name] = StoredTensor(file_name, entry["dtype"], shape, data + begin, end - begin)
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


# Writing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One tensor as a file holds it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Item = tuple[Entry, ...]  # what one tensor of the model is stored as: itself, or codes and their scales


def item_of(key: str, shape: tuple[int, ...], dtype: torch.dtype, fp8: bool = False) -> Item:
    """How the tensor ``key`` is stored: in ``dtype``, or as block-FP8 codes and float32 scales."""
    if not fp8:
        return (Entry(key, dtype, shape),)
    grid = (-(-shape[0] // FP8_BLOCK[0]), -(-shape[1] // FP8_BLOCK[1]))
    return (Entry(key, torch.float8_e4m3fn, shape), Entry(key + SCALE_SUFFIX, torch.float32, grid))


def split(items: Iterable[Item], max_bytes: int) -> list[list[Item]]:
    """Items in order, cut into files of at most ``max_bytes`` unless one alone is larger."""
    files: list[list[Item]] = []
    filled = 0
    for item in items:
        size = sum(entry.num_bytes for entry in item)
        if not files or filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return files


def file_names(count: int) -> list[str]:
    """Names of ``count`` files, as transformers numbers them."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


class FilesWriter:
    """Appends tensors in order to files whose contents are known beforehand.

    Args:
        contents: (file, its items), in the order of writing.
    """

    def __init__(self, contents: Sequence[tuple[Path, list[Item]]]) -> None:
        self._first = {items[0][0].key: (file, items) for file, items in contents}
        self._stream: BinaryIO | None = None
        self._file = Path()

    def write(self, item: Item, tensor: torch.Tensor) -> None:
        """The next item's numbers, quantized where it has scales.

        Raises:
            CheckpointError: the disk takes no more.
        """
        try:
            if item[0].key in self._first:
                self.close()
                self._file, items = self._first[item[0].key]
                self._stream = open(self._file, "wb")
                self._stream.write(header_bytes(items))
            assert self._stream is not None, "items are written in the order they were announced in"
            for part in [tensor.to(item[0].dtype)] if len(item) == 1 else quantize_fp8(tensor):
                self._stream.write(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise _disk_error(self._file, error, f"while {item[0].key} was written") from error

    def close(self) -> None:
        """Close the last file; until then some of it may not have reached the disk.

        Raises:
            CheckpointError: the disk takes no more.
        """
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                stream.close()
        except OSError as error:
            raise _disk_error(self._file, error, "at its end") from error


def _disk_error(file: Path, error: OSError, when: str) -> CheckpointError:
    return CheckpointError(f"{file}: {error.strerror} {when}. Make room or name another directory")


def header_bytes(items: list[Item]) -> bytes:
    """Length and JSON header of a safetensors file with these tensors, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in (entry for item in items for entry in item):
        begin, end = end, end + entry.num_bytes
        offsets = [begin, end]
        entries[entry.key] = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # readers want the data aligned
    return len(text).to_bytes(8, "little") + text
