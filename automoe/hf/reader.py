"""HuggingFace safetensors straight into the shards of a model on any mesh.

Headers are parsed once, on rank 0, where the whole checkpoint is checked against the model; every
rank then reads the ranges it owns, in file order. No rank ever holds a whole tensor that it owns a
part of, and nothing is initialised first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError
from automoe.hf.files import StoredTensor, listed, read_headers
from automoe.hf.keys import FUSED, KeyMap, Piece, hf_pieces, hf_tensors
from automoe.hf.registry import family_of
from automoe.hf.shards import LocalShard, Parts, as_parts, local_shards, raise_everywhere
from automoe.model.decoder import Decoder
from automoe.model.init import reset_buffers

_CHUNK_BYTES = 64 << 20  # read at once, which bounds the scratch memory
FLOAT_DTYPES = {"F64", "F32", "BF16", "F16"}


@dataclass(frozen=True)
class Catalog:
    """What a checkpoint directory holds, and the names by which it does."""

    folder: Path
    tensors: dict[str, StoredTensor]
    keys: KeyMap


@dataclass(frozen=True)
class Read:
    """One range of one stored tensor and the place in a shard that it belongs to."""

    shard: LocalShard
    piece: Piece
    stored: StoredTensor
    source: tuple[slice, ...]
    target: tuple[int | slice, ...]

    @property
    def key(self) -> str:
        return self.piece.key


def load_hf(parts: Parts | Decoder, path: str | Path, catalog: Catalog | None = None) -> None:
    """Fill a model, or this rank's pipeline stages of one, from a checkpoint directory.

    Collective, unless ``catalog`` (of the same directory) is given.

    Parameters may be DTensors on either mesh and need storage (``to_empty``) but no values; buffers
    that a checkpoint does not hold get their first values. Numbers are converted to each parameter's
    dtype.

    Raises:
        CheckpointError: on every rank alike: a file missing, truncated or a Git LFS pointer, keys
            missing or unexpected, another shape or number of experts.
    """
    parts = as_parts(parts)
    for part in parts.values():
        reset_buffers(part)

    def fill(read: Read, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    collective = catalog is None
    failure = None
    try:
        with torch.no_grad():
            visit(parts, catalog or open_catalog(path, config_of(parts)), fill)
    except CheckpointError as error:
        failure = error
    if collective:
        raise_everywhere(failure)
    elif failure is not None:
        raise failure


def open_catalog(path: str | Path, config: ModelConfig) -> Catalog:
    """Headers of every file, read and checked against the whole model on rank 0, for all ranks. Collective.

    Raises:
        CheckpointError: as ``load_hf``.
    """
    if not dist.is_initialized():
        return _check_catalog(path, config)
    outcome: list[Catalog | CheckpointError] = []
    if dist.get_rank() == 0:
        try:
            outcome.append(_check_catalog(path, config))
        except CheckpointError as error:  # the others wait for an answer
            outcome.append(error)
    else:
        outcome.append(CheckpointError("no answer from rank 0"))
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointError):
        raise outcome[0]
    return outcome[0]


def visit(parts: Parts, catalog: Catalog, use: Callable[[Read, torch.Tensor, torch.Tensor], None]) -> None:
    """Call ``use(read, stored range, place in the shard)`` for all that this rank owns, in file order.

    Both tensors have the same shape; the first is on the CPU in the checkpoint's dtype and may be
    changed or dropped.

    Raises:
        CheckpointError: a file that was there when its header was read cannot be read any more.
    """
    reads = sorted(_plan(parts, catalog), key=lambda read: (read.stored.file, read.stored.start))
    opened = ""
    file: Any = None
    for read in reads:
        try:
            if read.stored.file != opened:
                opened, file = read.stored.file, None  # one mapping at a time
                file = safe_open(catalog.folder / opened, framework="pt", device="cpu")
            stored = file.get_slice(read.key)
            place = read.shard.local[read.target]
            for source, rows in _chunks(read, place):
                use(read, read.piece.from_stored(stored[source]), place[rows])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{catalog.folder / read.stored.file}: {read.key} cannot be read ({error}). Copy the file again"
            ) from error


def _chunks(read: Read, place: torch.Tensor) -> Iterator[tuple[tuple[slice, ...], slice]]:
    """Cut a read along its first dim so that no piece is larger than ``_CHUNK_BYTES``."""
    first = read.source[0]
    rows = first.stop - first.start
    row_bytes = max(1, place.numel() // rows * max(place.element_size(), 4))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield (slice(first.start + begin, first.start + end), *read.source[1:]), slice(begin, end)


def _plan(parts: Parts, catalog: Catalog) -> Iterator[Read]:
    for shard in local_shards(parts):
        if shard.local.numel() == 0:  # a dim shorter than its axis leaves ranks with nothing
            continue
        for piece in hf_pieces(shard.name, tuple(shard.tensor.shape), catalog.keys):
            if (found := piece.overlap(shard.start, tuple(shard.local.shape))) is not None:
                yield Read(shard, piece, catalog.tensors[piece.key], *found)


def config_of(parts: Parts) -> ModelConfig:
    """The whole model's configuration, which every part carries."""
    return next(iter(parts.values())).config


def _check_catalog(path: str | Path, config: ModelConfig) -> Catalog:
    folder = Path(path).expanduser()
    tensors = read_headers(folder)
    fused = any(key.endswith(f".{FUSED.gate}") for key in tensors)
    keys = family_of(config).keys
    keys = keys.in_memory if fused else keys
    wanted = hf_tensors(config, keys)
    _check_experts(folder, tensors, config, keys)
    missing = [key for key in wanted if key not in tensors]
    unexpected = [key for key in tensors if key not in wanted and not _ignored(key, config)]
    if missing or unexpected:
        found = [f"{len(missing)} tensors are missing: {listed(missing)}"] if missing else []
        found += [f"{len(unexpected)} are not the model's: {listed(unexpected)}"] if unexpected else []
        raise CheckpointError(
            f"{folder} does not hold this {config.family} model of {config.num_layers} layers and "
            f"{len(wanted)} tensors: {'; '.join(found)}. Compare the model's configuration with its config.json"
        )
    wrong = [key for key in wanted if tensors[key].shape != wanted[key]]
    if wrong:
        shapes = [f"{key} is {list(tensors[key].shape)}, not {list(wanted[key])}" for key in wrong[:4]]
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors have another shape than the model's: {'; '.join(shapes)}. "
            "Compare the model's configuration with its config.json"
        )
    quantised = [key for key in wanted if tensors[key].dtype not in FLOAT_DTYPES]
    if quantised:
        raise CheckpointError(
            f"{folder}: {len(quantised)} tensors are quantised ({tensors[quantised[0]].dtype}): "
            f"{listed(quantised)}. This version reads {', '.join(sorted(FLOAT_DTYPES))}: convert it to bfloat16"
        )
    return Catalog(folder, {key: tensors[key] for key in wanted}, keys)


def _check_experts(folder: Path, tensors: dict[str, StoredTensor], config: ModelConfig, keys: KeyMap) -> None:
    """Another number of experts would show as thousands of missing or unexpected keys: say it plainly."""
    numbers = {keys.expert_of(key) for key in tensors if not _ignored(key, config)} - {None}
    count = len(numbers)
    if keys.fused:
        count = next(tensors[key].shape[0] for key in tensors if key.endswith(f".{FUSED.gate}"))
    if count and count != config.num_experts:
        raise CheckpointError(
            f"{folder} holds {count} experts a layer, and the model has {config.num_experts} "
            f"(model.num_experts). Set model.num_experts={count}, or complete the checkpoint"
        )


def _ignored(key: str, config: ModelConfig) -> bool:
    """Stored but never ours: MTP modules behind the last layer, rotary tables, a second copy of a tied head."""
    if key.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and key == "lm_head.weight"):
        return True
    parts = key.split(".")
    return parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= config.num_layers
