"""This rank's shards of the model's tensors that a HuggingFace checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from automoe.comm.local_shard import global_offset, local_shard
from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.keys import KeyMap, Shape, mtp_copies, our_tensors
from automoe.hf.merge import add_low_rank
from automoe.model.causal_lm import CausalLM
from automoe.moe.lora import Added
from automoe.parallel.fsdp import reshard
from automoe.quantize.packed import base_of, block_size, is_packed, unpack

Parts = dict[int, CausalLM]

# dtypes of parameters in an export; None keeps each one's own.
EXPORT_DTYPES: dict[str, torch.dtype | None] = {
    "keep": None,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def export_dtype(name: str) -> torch.dtype | None:
    """Return the torch dtype of ``bfloat16`` or ``float32``; None for ``keep``.

    Raises:
        ConfigError: any other name.
    """
    if name not in EXPORT_DTYPES:
        raise ConfigError(
            "dtype", name, f"an export has one of {', '.join(EXPORT_DTYPES)}", "Use keep"
        )
    return EXPORT_DTYPES[name]


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of one tensor of the model, and its position in the full tensor.

    The storage may be packed in 8 or 4 bits (``automoe.quantize.packed``). Then ``shape``,
    ``extent`` (shape of the shard), ``start`` and ``dtype`` describe the unpacked matrix, while
    ``tensor`` and ``local`` hold bytes.

    Attributes:
        name: name in the full model.
        tensor: the parameter or buffer, a DTensor if it is sharded.
        local: this rank's storage of the tensor.
        start: index of the storage's first element in the full tensor, on every dim.
        trained: True for parameters, False for buffers.
        copy: True for a later stage's copy of the embedding, which the first stage holds too.
        again: True for a copy of embedding or head that files store again for a module for
            multi-token prediction.
        columns: columns of the full matrix if it is packed, else 0.
        added: function that gathers the adapter which an export adds to the numbers as scale B A: A
            [..., r, I] and B [..., O, r] of this shard, and the scale. Collective.
    """

    name: str
    tensor: Tensor
    local: Tensor
    start: Shape
    trained: bool = True
    copy: bool = False
    again: bool = False
    columns: int = 0
    added: Callable[[], Added] | None = None

    @cached_property
    def base(self) -> str:
        """Format of the bytes in which the shard is packed, ``fp8`` or ``nf4``; "" if it is not packed."""
        return base_of(self.local) if self.columns else ""

    @property
    def shape(self) -> Shape:
        """Shape of the full (unsharded) tensor."""
        shape = tuple(self.tensor.shape)
        return (*shape[:-2], self.columns) if self.columns else shape

    @cached_property
    def extent(self) -> Shape:
        """Shape of this rank's shard."""
        extent = tuple(self.local.shape)
        if not self.columns:
            return extent
        width = min(extent[-2] * block_size(self.local), self.columns - self.start[-1])
        return *extent[:-2], width

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the numbers: that of ``tensor``, or float32 if it is packed."""
        return torch.float32 if self.columns else self.tensor.dtype

    @torch.no_grad()
    def numbers(self, index: tuple[int | slice, ...]) -> Tensor:
        """Return the numbers at ``index`` of this shard, dequantized if it is packed in 8 or 4 bits.

        If an export adds an adapter (``added``), its scale B A is included; the call is then
        collective. ``index`` must leave the columns of a packed matrix whole.
        """
        numbers = unpack(self.local[index], self.extent[-1], torch.float32)
        if self.added is None:
            return numbers
        a, b, scale = self.added()
        total = numbers.to(b.dtype, copy=not self.columns)
        add_low_rank(total, a if a.dim() == 2 else a[index[0]], b[index[:-1]], scale)
        return total if self.columns else total.to(numbers.dtype)

    def matrices(self) -> Iterator[tuple[tuple[slice, ...], LocalShard]]:
        """Yield each expert's index in this shard, and a new, unfilled CPU shard of its size.

        If experts are not stacked, yield once, for the entire shard.
        """
        first, *rest = self.extent
        step = 1 if rest[1:] else max(first, 1)
        for at in range(0, first if self.local.numel() else 0, step):
            index = (slice(at, at + step), *[slice(None)] * len(rest))
            start = (self.start[0] + at, *self.start[1:])
            whole = torch.empty(self.shape, device="meta")
            yield (
                index,
                LocalShard(self.name, whole, torch.empty(step, *rest, dtype=self.dtype), start),
            )


def as_parts(parts: Parts | CausalLM) -> Parts:
    """Return a model's pipeline stages by number; a whole model becomes stage 0.

    Weights that a forward pass left unsharded are resharded.
    """
    parts = {0: parts} if isinstance(parts, CausalLM) else parts
    reshard(parts.values())
    return parts


def config_of(parts: Parts) -> ModelConfig:
    """Return the full model's configuration, which each of this rank's stages (``parts``) carries."""
    return next(iter(parts.values())).config


def stage_ranks(tensors: Iterable[Tensor]) -> Shape:
    """Return, in order, the ranks that hold the same pipeline stages as this rank.

    These are the ranks of the largest mesh of ``tensors``, this rank's tensors. If no tensor has a
    mesh, the result is (0,).
    """
    meshes = [tensor.device_mesh.mesh for tensor in tensors if isinstance(tensor, DTensor)]
    return tuple(sorted(max(meshes, key=Tensor.numel).flatten().tolist())) if meshes else (0,)


def local_shards(
    parts: Parts, adapters: Mapping[str, Callable[[], Added]] = {}
) -> Iterator[LocalShard]:
    """Yield the tensors of this rank's stages that a checkpoint holds, in the model's order.

    Args:
        parts: this rank's pipeline stages by number.
        adapters: result of ``adapters_of``, to export weights with adapters added.
    """
    for part in parts.values():
        copies = mtp_copies(part.config)
        shapes = dict(our_tensors(part.config))
        for name, parameter in part.named_parameters():
            if ".lora." not in name:
                tied = name == "embed_tokens.weight" and not part.embeds
                columns = shapes[name][-1] if is_packed(parameter) else 0
                yield _shard(name, parameter, columns=columns, copy=tied, added=adapters.get(name))
                for again in (
                    copy for copy, original in copies.items() if original == name and not tied
                ):
                    yield _shard(again, parameter, again=True)
        for name, buffer in part.named_buffers():
            if name in shapes:
                yield _shard(name, buffer, trained=False)


def _shard(name: str, tensor: Tensor, **facts: Any) -> LocalShard:
    tensor = tensor.detach()
    start = global_offset(tensor)
    if is_packed(tensor):  # the last two dims are blocks and bytes
        start = (*start[:-2], start[-2] * block_size(tensor))
    return LocalShard(name, tensor, local_shard(tensor), start, **facts)


def check_tables(shards: list[LocalShard], folder: Path, keys: KeyMap, num_experts: int) -> None:
    """Raise ``CheckpointError`` if a table of token ids names an expert that the model lacks.

    Args:
        shards: filled from ``folder``; those of ``tid2eid`` [V, K] have the experts of each token
            id.
        keys: layout of the files, for the tensor's name in the error.
        num_experts: experts of a layer; a number outside 0 ... num_experts - 1 is refused.
    """
    for shard in shards:
        if not shard.name.endswith("tid2eid"):
            continue
        outside_V = ((shard.local < 0) | (shard.local >= num_experts)).any(-1)
        for row in outside_V.nonzero().flatten().tolist():
            key = keys.pieces(shard.name, shard.shape)[0].key
            raise CheckpointError(
                f"{folder}: row {shard.start[0] + row} of {key} is {shard.local[row].tolist()}, and experts are "
                f"numbered from 0 to {num_experts - 1}. Copy the checkpoint again"
            )
