"""This rank's part of a model's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from automoe.config.schema import ModelConfig
from automoe.errors import ConfigError
from automoe.local_shard import global_offset, local_shard
from automoe.model.decoder import Decoder
from automoe.parallel.fsdp import fsdp_modules

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
    for part in parts.values():
        for name, parameter in part.named_parameters():
            if ".lora." not in name:
                yield _shard(name, parameter, copy=name == "embed_tokens.weight" and not part.embeds)
        for name, buffer in part.named_buffers():
            if name.endswith(".expert_bias"):
                yield _shard(name, buffer, trained=False)


def _shard(name: str, tensor: torch.Tensor, **facts: bool) -> LocalShard:
    tensor = tensor.detach()
    return LocalShard(name, tensor, local_shard(tensor), global_offset(tensor), **facts)
