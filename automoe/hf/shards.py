"""This rank's part of a model's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from automoe.config.schema import ModelConfig
from automoe.errors import ConfigError
from automoe.hf.keys import our_tensors
from automoe.model.decoder import Decoder
from automoe.moe.local_shard import global_offset, local_shard
from automoe.parallel.fsdp import fsdp_modules
from automoe.quantize.packed import base_of, block_size, is_packed, unpack

Parts = dict[int, Decoder]

# What parameters may become in an export; None keeps each one's own dtype.
EXPORT_DTYPES: dict[str, torch.dtype | None] = {"keep": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


def export_dtype(name: str) -> torch.dtype | None:
    """One of ``EXPORT_DTYPES``. Raises ``ConfigError`` for another name."""
    if name not in EXPORT_DTYPES:
        raise ConfigError("dtype", name, f"an export has one of {', '.join(EXPORT_DTYPES)}", "Use keep")
    return EXPORT_DTYPES[name]


@dataclass(frozen=True)
class LocalShard:
    """What this rank holds of one tensor of the model.

    Attributes:
        name: global name, equal to the one in the whole model.
        tensor: the parameter or buffer itself, a DTensor where it is sharded.
        local: this rank's storage of it.
        start: index of the storage's first element in the whole tensor, on every dim.
        trained: a parameter, not a buffer.
        copy: the embedding of a last stage whose head is tied to it; the first stage has it too.
    """

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    start: tuple[int, ...]
    trained: bool = True
    copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def extent(self) -> tuple[int, ...]:
        """Size of this rank's part on every dim."""
        return tuple(self.local.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""
        return self.tensor.dtype

    def numbers(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        """This part's numbers at ``index`` of it."""
        return self.local[index]


@dataclass(frozen=True)
class PackedShard(LocalShard):
    """That of a packed matrix (``automoe.quantize.packed``): ``tensor`` and ``local`` are bytes, the rest is its own.

    Attributes:
        columns: of the whole matrix.
        added: what an export adds, scale B A: A [..., r, I], B [..., O, r] for this part, and the scale.
    """

    columns: int = 0
    added: tuple[torch.Tensor, torch.Tensor, float] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.tensor.shape[:-2], self.columns

    @property
    def extent(self) -> tuple[int, ...]:
        width = min(self.local.shape[-2] * block_size(self.local), self.columns - self.start[-1])
        return *self.local.shape[:-2], width

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def base(self) -> str:
        """The ``lora.base`` that it is packed by."""
        return base_of(self.local)

    @torch.no_grad()
    def numbers(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        """Widened, with an adapter's product added, in float32 at least; ``index`` leaves columns whole."""
        found = unpack(self.local[index], self.extent[-1], torch.float32)
        if self.added is None:
            return found
        a, b, scale = self.added
        found = found.to(b.dtype)
        _add_product(found, a if a.dim() == 2 else a[index[0]], b[index[:-1]], scale)
        return found

    def matrices(self, widened: bool = True) -> Iterator[tuple[tuple[slice, ...], LocalShard]]:
        """Its first dim entry by entry, or a matrix as it is: the index, and a plain shard on the CPU, in float32.

        Args:
            widened: the plain shard has the numbers; else nothing yet.
        """
        rest = (slice(None),) * (len(self.start) - 1)
        steps = [slice(None)] if len(self.start) == 2 else [slice(i, i + 1) for i in range(self.extent[0])]
        for step in steps if self.local.numel() else ():
            index = (step, *rest)
            if widened:
                numbers = self.numbers(index).cpu()
            else:
                numbers = torch.empty((len(range(self.extent[0])[step]), *self.extent[1:]), dtype=torch.float32)
            start = (self.start[0] + (step.start or 0), *self.start[1:])
            yield index, LocalShard(self.name, torch.empty(self.shape, device="meta"), numbers, start)


def _add_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """into [..., O, I] += scale b [..., O, r] a [..., r, I], each matrix alone, so that bits do not depend on how many.

    ``a`` may lack inner dims of ``b``, whose matrices then share it.
    """
    if b.dim() == 2:
        into.add_(b @ a, alpha=scale)
        return
    for k in range(b.shape[0]):
        _add_product(into[k], a[k] if a.dim() == 3 else a, b[k], scale)


def as_parts(parts: Parts | Decoder) -> Parts:
    """One decoder counts as a pipeline of one stage. Frees whole weights that a forward pass has gathered."""
    parts = {0: parts} if isinstance(parts, Decoder) else parts
    for part in parts.values():
        for module in fsdp_modules(part):
            module.reshard()
    return parts


def config_of(parts: Parts) -> ModelConfig:
    """The whole model's configuration, which every part carries."""
    return next(iter(parts.values())).config


def local_shards(parts: Parts) -> Iterator[LocalShard]:
    """Every tensor of this rank's stages that a HuggingFace checkpoint holds, in the model's order; no adapters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts.values():
        for name, parameter in part.named_parameters():
            if is_packed(parameter):
                shapes = shapes or dict(our_tensors(part.config))
                path, _, last = name.rpartition(".")
                added = getattr(part.get_submodule(path), "added", {}).get(last)
                yield _packed_shard(name, parameter.detach(), shapes[name][-1], added)
            elif ".lora." not in name:
                yield _shard(name, parameter, copy=name == "embed_tokens.weight" and not part.embeds)
        for name, buffer in part.named_buffers():
            if name.endswith(".expert_bias"):
                yield _shard(name, buffer, trained=False)


def _packed_shard(name: str, tensor: torch.Tensor, columns: int, added: Any) -> PackedShard:
    *outer, block, _ = global_offset(tensor)
    start = (*outer, block * block_size(tensor))
    return PackedShard(name, tensor, local_shard(tensor), start, columns=columns, added=added)


def _shard(name: str, tensor: torch.Tensor, **facts: bool) -> LocalShard:
    tensor = tensor.detach()
    return LocalShard(name, tensor, local_shard(tensor), global_offset(tensor), **facts)
