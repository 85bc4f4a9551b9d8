"""A model on any mesh written as a HuggingFace checkpoint directory, all of it or nothing.

Every rank streams the tensors that it was given to write into files of its own; what is gathered at
once is one tensor of the checkpoint. The directory gets its name when everything is on disk and checked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from automoe.errors import AutomoeError, CheckpointError
from automoe.hf.families.registry import family_of
from automoe.hf.files import FilesWriter, Item, file_names, item_of, split
from automoe.hf.folder import commit_folder, prepare_folder, working_folder, write_index, write_settings
from automoe.hf.keys import KeyMap, Piece, fp8_config, hf_pieces, is_quantized_in_fp8
from automoe.hf.shards import (
    LocalShard,
    Parts,
    all_gather_object,
    as_parts,
    config_of,
    export_dtype,
    is_first_rank,
    local_shards,
    on_every_rank,
    on_first_rank,
    raise_everywhere,
)
from automoe.hf.verify import verify_hf
from automoe.model.decoder import Decoder


@dataclass(frozen=True)
class Written:
    """What was written, and how it was found equal.

    Attributes:
        num_tensors, num_files, num_bytes: sizes of the whole checkpoint.
        checked: compared with the live weights and with transformers.
        fp8: quantized, so equal to the weights only after their quantization.
        logits_error: relative difference to transformers' logits; None for a model too large to be run
            twice, and on ranks other than the first.
    """

    path: Path
    num_tensors: int
    num_files: int
    num_bytes: int
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


def export_model(
    parts: Parts | Decoder, path: str | Path, *, dtype: str = "keep", fp8: bool = False, **options: Any
) -> Written:
    """Write a HuggingFace checkpoint of a model and prove it; only then it gets its name. Collective.

    Args:
        options: those of ``save_hf``.

    Raises:
        ConfigError, CheckpointError: as ``save_hf``, and when the checkpoint is not equal to the model.
    """
    errors: list[float | None] = []

    def check(folder: Path) -> None:
        errors.append(verify_hf(parts, folder, dtype=dtype, fp8=fp8))

    written = save_hf(parts, path, dtype=dtype, fp8=fp8, check=check, **options)
    return replace(written, checked=True, logits_error=errors[0], fp8=fp8)


def save_hf(
    parts: Parts | Decoder,
    path: str | Path,
    *,
    dtype: str = "keep",
    fp8: bool = False,
    max_shard_bytes: int = 5 << 30,
    tokenizer: str | None = None,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Written:
    """Write a checkpoint directory that ``transformers`` loads. Collective; ranks share the file system.

    ``model.hf_path`` of the model's configuration, where it is set, gives what weights cannot tell:
    token ids, generation settings, tokenizer files.

    Args:
        parts: the model, or this rank's pipeline stages of it.
        dtype: ``keep`` (the parameters' own), ``bfloat16`` or ``float32``; buffers keep theirs.
        fp8: the matrices of layers as block-FP8, like DeepSeek-V3's own checkpoint.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        tokenizer: ``byte`` or a directory whose tokenizer files are copied; None: those of hf_path.
        overwrite: replace a checkpoint directory that is there.
        check: called on every rank with the finished directory before it gets its name.

    Raises:
        ConfigError: ``fp8`` of a family that has no such checkpoints, or another dtype.
        CheckpointError: on every rank alike: the directory exists or cannot be written, or what
            ``check`` raised. Nothing is left under ``path`` then, and an older export stays.
    """
    parts, path = as_parts(parts), Path(path).expanduser().absolute()
    config, folder = config_of(parts), working_folder(path)
    keys = family_of(config).keys
    quantization = fp8_config(config, keys) if fp8 else None
    out_dtype = export_dtype(dtype)
    try:
        on_first_rank(lambda: prepare_folder(path, overwrite))
        plan = plan_outgoing(parts, keys, out_dtype, fp8=fp8)
        written = _write_tensors(plan, folder, max_shard_bytes)
        dtype_name = str(next(out.dtype for out in plan if out.shard.trained)).removeprefix("torch.")
        on_first_rank(lambda: write_settings(folder, config, dtype_name, tokenizer, quantization))
        if check is not None:
            on_every_rank(lambda: check(folder))
        on_first_rank(lambda: commit_folder(path))
    except AutomoeError:
        if is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return replace(written, path=path)


def _write_tensors(plan: list[Outgoing], folder: Path, max_shard_bytes: int) -> Written:
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = split((out.item for out in plan if out.writer == rank), max_shard_bytes)
    keys = [[entry.key for item in file for entry in item] for file in mine]
    num_bytes = sum(entry.num_bytes for file in mine for item in file for entry in item)
    ranks = all_gather_object((keys, num_bytes))
    names = file_names(sum(len(theirs) for theirs, _ in ranks))
    first = sum(len(theirs) for theirs, _ in ranks[:rank])
    paths = [folder / name for name in names[first : first + len(mine)]]
    _stream(plan, rank, FilesWriter(list(zip(paths, mine, strict=True))))
    contents = [file for theirs, _ in ranks for file in theirs]
    weight_map = {key: name for name, file in zip(names, contents, strict=True) for key in file}
    total = sum(their_bytes for _, their_bytes in ranks)
    on_first_rank(lambda: write_index(folder, weight_map, total))
    return Written(folder, len(weight_map), len(names), total)


def _stream(plan: list[Outgoing], rank: int, files: FilesWriter) -> None:
    """Gather tensor after tensor; whoever writes one appends it to its file.

    A rank that cannot write any more still takes part in gathering, and says so at the end.
    """
    failure: CheckpointError | None = None
    for out in plan:
        if rank not in out.holders:
            continue
        with torch.no_grad():
            tensor = gather(out)
        if out.writer != rank or failure is not None:
            continue
        try:
            files.write(out.item, tensor)
        except CheckpointError as error:
            failure = error
    try:
        files.close()
    except CheckpointError as error:
        failure = failure or error
    raise_everywhere(failure)


# Gathering ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outgoing:
    """One tensor of the checkpoint to be.

    Attributes:
        holders: ranks that together hold it, and take part in gathering it.
        writer: the one of them that writes it.
    """

    shard: LocalShard
    piece: Piece
    dtype: torch.dtype
    holders: tuple[int, ...]
    writer: int
    fp8: bool = False

    @property
    def item(self) -> Item:
        """What the files hold for it."""
        return item_of(self.piece.key, self.piece.shape, self.dtype, self.fp8)


def plan_outgoing(parts: Parts, keys: KeyMap, dtype: torch.dtype | None, fp8: bool = False) -> list[Outgoing]:
    """All tensors of this rank's stages, the same list on every rank of a stage; bytes are spread evenly.

    Args:
        dtype: of parameters in the checkpoint; None keeps each one's own. Buffers always keep theirs.
        fp8: quantize what block-FP8 checkpoints quantize.
    """
    plan: list[Outgoing] = []
    load: dict[int, int] = {}
    shards = list(local_shards(parts))
    stage_ranks = _ranks_of(shards)
    for shard in shards:
        if shard.copy:
            continue
        for piece in hf_pieces(shard.name, tuple(shard.tensor.shape), keys):
            holders = stage_ranks
            if isinstance(shard.tensor, DTensor):
                holders = _holders(shard.tensor, piece, first=stage_ranks[0])
            writer = min(holders, key=lambda rank: (load.get(rank, 0), rank))
            quantized = fp8 and is_quantized_in_fp8(piece.key, piece.shape, keys)
            kept = quantized or not shard.trained  # quantized: rounded once, to FP8
            out_dtype = shard.tensor.dtype if dtype is None or kept else dtype
            plan.append(Outgoing(shard, piece, out_dtype, holders, writer, quantized))
            load[writer] = load.get(writer, 0) + sum(entry.num_bytes for entry in plan[-1].item)
    return plan


def gather(outgoing: Outgoing) -> torch.Tensor:
    """The whole tensor in its checkpoint dtype; every rank of ``holders`` calls this together."""
    shard, piece = outgoing.shard, outgoing.piece
    found = piece.overlap(shard.start, tuple(shard.local.shape))
    assert found is not None, "called by a rank that does not hold the tensor"
    tensor = shard.local[found[1]].to(outgoing.dtype)
    if not isinstance(shard.tensor, DTensor):
        return piece.to_stored(tensor)
    mesh = shard.tensor.device_mesh
    for axis, dim, size in _gathered_axes(shard.tensor, piece):
        tensor = _join(tensor, dim, size, mesh.get_group(axis))
    return piece.to_stored(tensor)


def _join(local: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate parts cut as ``torch.chunk`` does; the last ones may be short or empty."""
    num_parts = dist.get_world_size(group)
    longest = -(-size // num_parts)
    padded = local
    if local.shape[dim] < longest:  # gloo gathers equal sizes alone
        shape = list(local.shape)
        shape[dim] = longest
        padded = local.new_zeros(shape)
        padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in range(num_parts)]
    dist.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat(parts, dim).narrow(dim, 0, size)


def _gathered_axes(tensor: DTensor, piece: Piece) -> list[tuple[int, int, int]]:
    """How to put a piece together: (mesh axis, dim of the HuggingFace tensor, extent when joined), in order.

    Where FSDP cuts a dim that tp or etp has already cut, its placement is strided and it is joined first.
    """
    mesh = tensor.device_mesh
    steps: list[tuple[int, int, int]] = []
    for dim in range(tensor.dim()):
        if _selected(piece, dim) is not None:
            continue
        axes = [axis for axis, placement in enumerate(tensor.placements) if _cut_dim(placement) == dim]
        axes.sort(key=lambda axis: not isinstance(tensor.placements[axis], _StridedShard))
        assert len(axes) <= 2, "a dim is cut by FSDP and at most one other axis"
        hf_dim = dim - sum(_selected(piece, before) is not None for before in range(dim))
        extent = piece.size[hf_dim]
        inner_first: list[tuple[int, int, int]] = []
        for axis in reversed(axes):
            inner_first.insert(0, (axis, hf_dim, extent))
            # What the outer cut leaves of the dim on this rank is what the inner one has cut.
            longest = -(-extent // mesh.size(axis))
            extent = max(0, min(longest, extent - longest * mesh.get_local_rank(axis)))
        steps += inner_first
    return steps


def _holders(tensor: DTensor, piece: Piece, first: int) -> tuple[int, ...]:
    """Ranks with a part or a copy of the piece: those at the owner's place on axes that cut selected dims.

    Args:
        first: lowest rank of the stage. A tensor that an axis (tp) leaves alone lies on a mesh without
            that axis, once per coordinate of it; the copy of the first coordinate counts.
    """
    ranks = tensor.device_mesh.mesh
    ranks = ranks - (ranks.min() - first)
    index: list[int | slice] = []
    for axis, placement in enumerate(tensor.placements):
        dim = _cut_dim(placement)
        at = None if dim is None else _selected(piece, dim)
        if at is None or dim is None:
            index.append(slice(None))
        else:
            index.append(at // -(-tensor.shape[dim] // ranks.shape[axis]))
    return tuple(ranks[tuple(index)].flatten().tolist())


def _cut_dim(placement: Placement) -> int | None:
    # Not a subclass of Shard in every torch.
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def _selected(piece: Piece, dim: int) -> int | None:
    return piece.select[dim] if dim < len(piece.select) else None


def _ranks_of(shards: list[LocalShard]) -> tuple[int, ...]:
    """Ranks that hold the same stages, in order: those of the largest mesh that a tensor lies on."""
    meshes = [shard.tensor.device_mesh.mesh for shard in shards if isinstance(shard.tensor, DTensor)]
    if not meshes:
        return (0,)  # no mesh: the first rank's copy of the model counts
    return tuple(sorted(max(meshes, key=lambda mesh: mesh.numel()).flatten().tolist()))
