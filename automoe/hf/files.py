"""The safetensors format: which tensor lies where, found from headers alone; and files written tensor after tensor.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range) and the
tensors' bytes: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from automoe.errors import CheckpointError, listed
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
class Written:
    """What was written, and how it was found equal.

    Attributes:
        num_tensors, num_files, num_bytes: sizes of the whole checkpoint.
        dtype: of the first parameter.
        checked: compared with the live weights and with transformers.
        fp8: quantized, so equal to the weights only after their quantization.
        logits_error: relative difference to transformers' logits; None for a model too large to be run twice.
    """

    path: Path
    num_tensors: int
    num_files: int
    num_bytes: int
    dtype: torch.dtype
    checked: bool = False
    fp8: bool = False
    logits_error: float | None = None

    def __str__(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        text = f"{self.path} ({self.num_tensors:,} tensors, {self.num_bytes / 1e6:,.1f} MB in {files}"
        if self.checked:
            text += "; " + ("FP8 of the weights" if self.fp8 else "equal bit for bit to the weights")
        if self.logits_error is not None:
            text += f", logits to transformers' within {self.logits_error:.0e}"
        return f"{text})"


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


def write_files(contents: Iterable[tuple[Path, list[Item]]], tensors: Iterator[torch.Tensor]) -> None:
    """Write files of some items each, one tensor of ``tensors`` after the other, quantized where it has scales.

    Raises:
        CheckpointError: the disk takes no more.
    """
    for file, items in contents:
        when = "at its beginning"
        try:
            with open(file, "wb") as stream:
                stream.write(header_bytes(items))
                for item in items:
                    tensor = next(tensors)
                    when = f"while {item[0].key} was written"
                    for part in [tensor.to(item[0].dtype)] if len(item) == 1 else quantize_fp8(tensor):
                        stream.write(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                when = "at its end"
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror} {when}. Make room or name another directory") from error


def write_index(folder: Path, names: list[str], contents: list[list[Item]], dtype: torch.dtype) -> Written:
    """The index (tensor -> file) of the files ``names``, where they are several; ``dtype`` is the first parameter's."""
    files = zip(names, contents, strict=True)
    placed = [(entry, name) for name, items in files for item in items for entry in item]
    total = sum(entry.num_bytes for entry, _ in placed)
    if len(names) > 1:
        weight_map = {entry.key: name for entry, name in sorted(placed, key=lambda one: one[0].key)}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return Written(folder, len(placed), len(names), total, dtype)


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
