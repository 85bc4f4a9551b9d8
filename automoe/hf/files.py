"""Writing of safetensors files and their index; ``automoe.hf.headers`` reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from automoe.errors import CheckpointError
from automoe.hf.headers import BITS, SINGLE_FILE, Contents, StoredTensor, coded_shapes
from automoe.hf.keys import FP8_BLOCK, GROUP, INDEX_FILE, Encoding, Shape
from automoe.storage.files import write_text

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """Summary of a written checkpoint and of its comparison with the model.

    Attributes:
        path: the checkpoint directory.
        num_tensors, num_files: numbers of tensors and of safetensors files in it.
        num_bytes: bytes of all tensors, scales included.
        dtype: dtype of the first parameter.
        checked: True if the files were compared with the live weights and with transformers.
        encoding: encoding of the quantized tensors, ``plain`` if there are none.
        error: relative difference (L2) of the quantized numbers to the weights; None if no tensor
            is quantized, or none was compared.
        logits_error: relative difference to transformers' logits; None for a model too large to be
            run twice.
        dense_error: relative difference of an upcycled model's logits to the dense model's.
        averaged: True for the averaged weights of ``optim.ema_decay``.
        notes: after a conversion, sentences for the user about the source (``Catalog.notes``).
        num_copied: number of tensors of other parts (``Catalog.beside``), copied bit for bit.
    """

    path: Path
    num_tensors: int
    num_files: int
    num_bytes: int
    dtype: torch.dtype
    checked: bool = False
    encoding: Encoding = "plain"
    error: float | None = None
    logits_error: float | None = None
    dense_error: float | None = None
    averaged: bool = False
    notes: tuple[str, ...] = ()
    num_copied: int = 0

    def __str__(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        text = f"{self.path} ({self.num_tensors:,} tensors, {self.num_bytes / 2**20:,.1f} MiB in {files}"
        if self.checked:
            weights = "the averaged weights" if self.averaged else "the weights"
            if self.error is None:
                text += f"; equal bit for bit to {weights} in the files' dtypes"
            else:
                text += f"; {self.encoding.upper()} of {weights}, {self.error:.2%} off"
        if self.logits_error is not None:
            text += f", logits equal to transformers' within {self.logits_error:.0e}"
        if self.dense_error is not None:
            text += f" and to the dense model's within {self.dense_error:.0e}"
        if self.num_copied:
            text += f"; {self.num_copied:,} tensors of other parts copied bit for bit"
        return f"{text})"


def stored_as(shape: Shape, dtype: torch.dtype, encoding: Encoding = "plain") -> StoredTensor:
    """Describe a tensor that will be stored in ``dtype``, or as codes and scales of ``encoding``.

    The result's fields ``file`` and ``start`` are not set yet ("" and 0).

    Args:
        shape: shape of the tensor before quantization.
    """
    if encoding == "plain":
        name = _DTYPE_NAMES[dtype]
        return StoredTensor("", name, shape, 0, math.prod(shape) * BITS[name] // 8)
    block = (1, GROUP) if encoding == "int4" else FP8_BLOCK
    dtypes = {
        "fp8": (torch.float8_e4m3fn, torch.float32),
        "int4": (torch.int32, torch.bfloat16),
        "mxfp4": (torch.uint8, torch.uint8),
    }
    codes, scales = map(stored_as, coded_shapes(shape, encoding, block), dtypes[encoding])
    return codes._replace(scales=scales, encoding=encoding)


def split(tensors: Iterable[tuple[str, StoredTensor]], max_bytes: int) -> list[Contents]:
    """Distribute (name, description) of tensors over files, in order; return name -> description per file.

    A file has at most ``max_bytes``, unless one tensor alone is larger.
    """
    files = []
    filled = 0
    for key, stored in tensors:
        if not files or filled + stored.total_bytes > max_bytes:
            files.append({})
            filled = 0
        files[-1][key] = stored
        filled += stored.total_bytes
    return files


def file_names(count: int) -> list[str]:
    """Return the names of ``count`` files, such as ``model-00001-of-00003.safetensors``."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_files(
    files: Iterable[tuple[Path, Contents]], tensors: Iterator[Sequence[torch.Tensor]]
) -> None:
    """Write safetensors files, one tensor at a time.

    Args:
        files: path of each file, and the tensors that it will hold, by name.
        tensors: for each tensor of ``files``, in order: its numbers, or codes and scales, in the
            dtypes of the file, or raw bytes (uint8).

    Raises:
        CheckpointError: the disk is full or fails.
    """
    for file, contents in files:
        when = "at its beginning"
        try:
            with open(file, "wb") as stream:
                stream.write(header_bytes(contents))
                for key in contents:
                    parts = next(tensors)
                    when = f"while {key} was written"
                    for part in parts:
                        stream.write(raw_bytes(part).data)
                when = "at its end"
        except OSError as error:
            raise CheckpointError(
                f"{file}: {error.strerror} {when}. Make room or name another directory"
            ) from error


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's bytes [num_bytes] as a file holds them, on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def write_index(folder: Path, files: list[Contents], dtype: torch.dtype) -> Written:
    """Write model.safetensors.index.json if there are several files, and return a summary.

    Args:
        files: tensors of each file, by name.
        dtype: dtype of the first parameter, for the summary.
    """
    weight_map = {
        key: name
        for name, contents in zip(file_names(len(files)), files, strict=True)
        for key in _in_file(contents)
    }
    total = sum(stored.total_bytes for contents in files for stored in contents.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    return Written(folder, len(weight_map), len(files), total, dtype)


def header_bytes(contents: Contents) -> bytes:
    """Return the first bytes of a safetensors file of ``contents``: header length, JSON header."""
    entries = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, stored in _in_file(contents).items():
        offsets = [end, end + stored.num_bytes]
        end += stored.num_bytes
        entries[key] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # readers expect the data to be aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _in_file(contents: Contents) -> Contents:
    """Return the entries of a file's header for ``contents``: a quantized tensor becomes codes and scales."""
    parts = (stored.in_file(key) for key, stored in contents.items())
    return {key: stored for part in parts for key, stored in part.items()}
