"""Writing of safetensors files and their index; ``automoe.hf.headers`` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from automoe.errors import CheckpointError
from automoe.hf.headers import SINGLE_FILE
from automoe.hf.keys import FP8_BLOCK, INDEX_FILE, SCALE_SUFFIX
from automoe.hf.quantized import quantize_fp8

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


@dataclass(frozen=True)
class Written:
    """Summary of a written checkpoint and of its comparison with the model.

    Attributes:
        num_tensors, num_files, num_bytes: sizes of the whole checkpoint.
        dtype: dtype of the first parameter.
        checked: True if the files were compared with the live weights and with transformers.
        fp8: True if quantized, so that the files equal the weights only after quantization.
        logits_error: relative difference to transformers' logits; None for a model too large to be
            run twice.
        dense_error: relative difference of an upcycled model's logits to the dense model's.
        averaged: True for the averaged weights of ``optim.ema_decay``.
        base: packed base (``lora.base``) that adapters were merged into; empty if none.
        rounded: True if the files' numbers are those of the model after rounding to ``dtype``.
        notes: of a conversion, those of the source's ``Catalog``.
    """

    path: Path
    num_tensors: int
    num_files: int
    num_bytes: int
    dtype: torch.dtype
    checked: bool = False
    fp8: bool = False
    logits_error: float | None = None
    dense_error: float | None = None
    averaged: bool = False
    base: str = ""
    rounded: bool = False
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        text = (
            f"{self.path} ({self.num_tensors:,} tensors, {self.num_bytes / 1e6:,.1f} MB in {files}"
        )
        if self.checked:
            weights = "the averaged weights" if self.averaged else "the weights"
            dtype = str(self.dtype).removeprefix("torch.")
            if self.base:
                weights += f", adapters merged into the {self.base} base as {dtype}"
            elif self.rounded:
                weights += f" rounded to {dtype}"
            text += f"; FP8 of {weights}" if self.fp8 else f"; equal bit for bit to {weights}"
        if self.logits_error is not None:
            text += f", logits to transformers' within {self.logits_error:.0e}"
        if self.dense_error is not None:
            text += f" and to the dense model's within {self.dense_error:.0e}"
        return f"{text})"


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of one tensor in a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Entries = tuple[Entry, ...]  # entries of one tensor: its numbers, or its codes and scales


def entries_of(key: str, shape: tuple[int, ...], dtype: torch.dtype, fp8: bool = False) -> Entries:
    """Return the entries of a tensor: one in ``dtype``, or block-FP8 codes and float32 scales."""
    if not fp8:
        return (Entry(key, dtype, shape),)
    grid = (-(-shape[0] // FP8_BLOCK[0]), -(-shape[1] // FP8_BLOCK[1]))
    return (Entry(key, torch.float8_e4m3fn, shape), Entry(key + SCALE_SUFFIX, torch.float32, grid))


def split(items: Iterable[Entries], max_bytes: int) -> list[list[Entries]]:
    """Distribute tensors, in order, over files.

    A file has at most ``max_bytes``, unless one tensor alone is larger.
    """
    files: list[list[Entries]] = []
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
    """Return the names of ``count`` files, numbered as transformers does."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_files(
    contents: Iterable[tuple[Path, list[Entries]]], tensors: Iterator[torch.Tensor]
) -> None:
    """Write the tensors one after the other; quantize a tensor whose entries include scales.

    Raises:
        CheckpointError: the disk is full or fails.
    """
    for file, items in contents:
        when = "at its beginning"
        try:
            with open(file, "wb") as stream:
                stream.write(header_bytes(items))
                for item in items:
                    tensor = next(tensors)
                    when = f"while {item[0].key} was written"
                    for part in (
                        [tensor.to(item[0].dtype)] if len(item) == 1 else quantize_fp8(tensor)
                    ):
                        stream.write(
                            part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                        )
                when = "at its end"
        except OSError as error:
            raise CheckpointError(
                f"{file}: {error.strerror} {when}. Make room or name another directory"
            ) from error


def write_index(
    folder: Path, names: list[str], contents: list[list[Entries]], dtype: torch.dtype
) -> Written:
    """Write the index (tensor -> file) if there are several files, and return a summary.

    Args:
        dtype: dtype of the first parameter, for the summary.
    """
    files = zip(names, contents, strict=True)
    placed = [(entry, name) for name, items in files for item in items for entry in item]
    total = sum(entry.num_bytes for entry, _ in placed)
    if len(names) > 1:
        weight_map = {entry.key: name for entry, name in sorted(placed, key=lambda one: one[0].key)}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return Written(folder, len(placed), len(names), total, dtype)


def header_bytes(items: list[Entries]) -> bytes:
    """Return length and JSON header of a safetensors file with these tensors, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in (entry for item in items for entry in item):
        begin = end
        end = end + entry.num_bytes
        offsets = [begin, end]
        entries[entry.key] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # readers expect the data to be aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text
