"""Safetensors files written tensor after tensor: what a tensor is stored as, what goes into which file, headers first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.catalog import SCALE_SUFFIX
from automoe.hf.families.registry import family_of
from automoe.hf.files import SINGLE_FILE
from automoe.hf.keys import KeyMap
from automoe.hf.quantized import FP8_BLOCK, quantize_fp8

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}


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


def item_of(key: str, shape: Sequence[int], dtype: torch.dtype, fp8: bool = False) -> Item:
    """How the tensor ``key`` is stored.

    Args:
        dtype: of its numbers where they are not quantized.
        fp8: as block-FP8 codes and float32 scales.
    """
    shape = tuple(shape)
    if not fp8:
        return (Entry(key, dtype, shape),)
    grid = (-(-shape[0] // FP8_BLOCK[0]), -(-shape[1] // FP8_BLOCK[1]))
    return (Entry(key, torch.float8_e4m3fn, shape), Entry(key + SCALE_SUFFIX, torch.float32, grid))


def encode(tensor: torch.Tensor, item: Item) -> Iterator[torch.Tensor]:
    """The tensors to be written for ``item``, in its order."""
    if len(item) == 1:
        yield tensor.to(item[0].dtype)
    else:
        yield from quantize_fp8(tensor)


def is_quantized_in_fp8(key: str, shape: Sequence[int], keys: KeyMap) -> bool:
    """Block-FP8 checkpoints quantize the matrices of layers; not routers, gates, the embedding or the head."""
    kept = (keys.router, keys.shared_gate)
    return key.startswith("model.layers.") and len(shape) == 2 and key.endswith(".weight") and not key.endswith(kept)


def fp8_config(config: ModelConfig) -> dict[str, Any]:
    """``quantization_config`` of a block-FP8 checkpoint, as DeepSeek-V3's.

    Raises:
        ConfigError: a family whose experts are not stored one by one.
    """
    keys = family_of(config).keys
    if keys.fused or keys.transposed:
        raise ConfigError(
            "model.family",
            config.family,
            "block-FP8 stores matrices, and this family stores all experts of a layer in one tensor",
            "Export it in bfloat16",
        )
    layers = range(config.first_k_dense, config.num_layers)
    names = [keys.router] + ([keys.shared_gate] if config.shared_expert_gate else [])
    kept = [f"model.layers.{layer}.{name.removesuffix('.weight')}" for layer in layers for name in names]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": ["lm_head", *kept],
    }


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
        """The next item's numbers.

        Raises:
            CheckpointError: the disk takes no more.
        """
        try:
            if item[0].key in self._first:
                self.close()
                self._file, items = self._first[item[0].key]
                self._stream = open(self._file, "wb")
                self._stream.write(_header(items))
            assert self._stream is not None, "items are written in the order they were announced in"
            for part in encode(tensor, item):
                self._stream.write(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise CheckpointError(
                f"{self._file}: {error.strerror} while {item[0].key} was written. Make room or name another directory"
            ) from error

    def write_headers(self) -> None:
        """Every file with its header and its size; the numbers are holes that take no room."""
        for file, items in self._first.values():
            header = _header(items)
            file.write_bytes(header)
            os.truncate(file, len(header) + sum(entry.num_bytes for item in items for entry in item))

    def close(self) -> None:
        """The last file; until then some of it may not have reached the disk.

        Raises:
            CheckpointError: the disk takes no more.
        """
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            stream.close()
        except OSError as error:
            raise CheckpointError(
                f"{self._file}: {error.strerror} at its end. Make room or name another directory"
            ) from error


def _header(items: list[Item]) -> bytes:
    """Length and JSON header of a safetensors file with these tensors, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in (entry for item in items for entry in item):
        begin, end = end, end + entry.num_bytes
        entries[entry.key] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # readers want the data aligned
    return len(text).to_bytes(8, "little") + text
