"""A model on any mesh written as a HuggingFace checkpoint directory, all of it or nothing.

Every rank streams the tensors that it was given to write into files of its own; what is gathered at
once is one tensor of the checkpoint. The directory gets its name when everything is on disk and checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from automoe.data.chat_template import ChatTemplate
from automoe.hf.catalog import Catalog, open_catalog
from automoe.hf.families.registry import family_of
from automoe.hf.files import Item, Written, file_names, item_of, split, write_files, write_index
from automoe.hf.folder import new_folder, write_settings
from automoe.hf.keys import KeyMap, Piece, fp8_config, hf_pieces, is_quantized_in_fp8
from automoe.hf.rewrite import own_dtype
from automoe.hf.shards import LocalShard, PackedShard, Parts, as_parts, config_of, export_dtype, local_shards
from automoe.hf.upcycle import upcycled_model
from automoe.hf.verify import verify_hf
from automoe.interop.torch_private import is_strided_shard
from automoe.model.decoder import Decoder
from automoe.model.lora import merge_adapters
from automoe.parallel.agreement import Ranks
from automoe.parallel.collectives import all_gather


def to_hf(
    model: Parts | Decoder,
    path: str | Path,
    *,
    dtype: str | torch.dtype = "keep",
    fp8: bool = False,
    max_shard_bytes: int = 5 << 30,
    tokenizer: str | None = None,
    chat: ChatTemplate | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> Written:
    """Write ``model`` as a HuggingFace checkpoint directory, which gets its name when it is complete and proven.

    Collective; ranks share the file system. Adapters are merged into the model's own weights first
    (``merge_adapters``), which stay merged. ``model.hf_path`` of the model's configuration, where it is set,
    gives what weights cannot tell: token ids, generation settings, tokenizer files.

    Args:
        model: the model, or this rank's pipeline stages of it.
        dtype: ``keep`` (those of the checkpoint at hf_path, bfloat16 where that is quantized; else the parameters'
            own), ``bfloat16`` or ``float32``, or torch's own name of these two; buffers keep theirs.
        fp8: the matrices of layers as block-FP8, like DeepSeek-V3's own checkpoint.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        tokenizer: that trained it: ``byte``, a directory whose files are copied, or ``none``; None: that of hf_path.
        chat: of conversations that trained it: generation stops where its answers end.
        overwrite: replace a checkpoint directory that is there.
        verify: compare every number with the model, and the whole with transformers (``verify_hf``).

    Raises:
        ConfigError: ``fp8`` of a family that has no such checkpoints, or another dtype; no such tokenizer, which
            ranks of several are told as a CheckpointError.
        CheckpointError: on every rank alike: the directory exists or cannot be written, or is not equal to the
            model. Nothing is left under ``path`` then, and an older export stays.
    """
    dtype = str(dtype).removeprefix("torch.")
    parts, path, ranks = as_parts(model), Path(path).expanduser().absolute(), Ranks()
    config = config_of(parts)
    keys = family_of(config).keys
    quantization = fp8_config(config, keys) if fp8 else None
    out_dtype = export_dtype(dtype)
    # The weights that training started from say what ``keep`` keeps: parameters are wider while they are trained.
    source = None
    if dtype == "keep" and config.hf_path is not None:
        upcycling = upcycled_model(config)[1] if config.upcycle else None
        source = open_catalog(config.hf_path, config, upcycling)
    with new_folder(path, overwrite, ranks) as folder:
        for part in parts.values():
            merge_adapters(part)
        plan = plan_outgoing(parts, keys, out_dtype, fp8=fp8, source=source)
        written = _write_tensors(plan, ranks, folder, max_shard_bytes)
        bases = {out.shard.base for out in plan if isinstance(out.shard, PackedShard)}
        written = replace(written, base="".join(bases))
        ranks.lead(lambda: write_settings(folder, config, written.dtype, tokenizer, quantization, chat))
        if verify:
            error = verify_hf(parts, folder, dtype={out.piece.key: out.dtype for out in plan}, fp8=fp8)
            written = replace(written, checked=True, fp8=fp8, logits_error=error)
    return replace(written, path=path)


def _write_tensors(plan: list[Outgoing], ranks: Ranks, folder: Path, max_shard_bytes: int) -> Written:
    mine = split((out.item for out in plan if out.writer == ranks.rank), max_shard_bytes)
    everyone = ranks.all(lambda: mine)
    contents = [items for theirs in everyone for items in theirs]
    names = file_names(len(contents))
    first = sum(len(theirs) for theirs in everyone[: ranks.rank])
    paths = [folder / name for name in names[first : first + len(mine)]]
    ranks.all(lambda: _stream(plan, ranks.rank, list(zip(paths, mine, strict=True))))
    dtype = next(out.dtype for out in plan if out.shard.trained)
    return ranks.lead(lambda: write_index(folder, names, contents, dtype))


def _stream(plan: list[Outgoing], rank: int, contents: list[tuple[Path, list[Item]]]) -> None:
    """Gather tensor after tensor; whoever writes one appends it to its file.

    A rank that cannot write any more still takes part in gathering, and says so at the end.
    """
    gathered = ((out, gather(out)) for out in plan if rank in out.holders)
    mine = (tensor for out, tensor in gathered if out.writer == rank)
    try:
        write_files(contents, mine)
    finally:
        for _ in gathered:
            pass


# Gathering ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outgoing:
    """One tensor of the checkpoint to be.

    Attributes:
        dtype: that it is gathered in.
        holders: ranks that together hold it, and take part in gathering it.
        writer: the one of them that writes it.
        item: what the files hold for it.
    """

    shard: LocalShard
    piece: Piece
    dtype: torch.dtype
    holders: tuple[int, ...]
    writer: int
    item: Item


def plan_outgoing(
    parts: Parts, keys: KeyMap, dtype: torch.dtype | None, fp8: bool = False, source: Catalog | None = None
) -> list[Outgoing]:
    """All tensors of this rank's stages, the same list on every rank of a stage; bytes are spread evenly.

    Args:
        dtype: of parameters in the checkpoint; None keeps each one's own, that in ``source`` where there is one.
            Buffers always keep theirs.
        fp8: quantize what block-FP8 checkpoints quantize.
    """
    plan: list[Outgoing] = []
    load: dict[int, int] = {}
    shards = list(local_shards(parts))
    # Those of the largest mesh that a tensor lies on hold the same stages; without one the first rank's copy counts.
    meshes = [shard.tensor.device_mesh.mesh for shard in shards if isinstance(shard.tensor, DTensor)]
    stage_ranks = tuple(sorted(max(meshes, key=torch.Tensor.numel).flatten().tolist())) if meshes else (0,)
    for shard in shards:
        if shard.copy:
            continue
        for piece in hf_pieces(shard.name, shard.shape, keys):
            holders = stage_ranks
            if isinstance(shard.tensor, DTensor):
                holders = _holders(shard.tensor, piece, first=stage_ranks[0])
            writer = min(holders, key=lambda rank: (load.get(rank, 0), rank))
            quantized = fp8 and is_quantized_in_fp8(piece.key, piece.shape, keys)
            kept = quantized or not shard.trained  # quantized: rounded once, to FP8
            out_dtype = shard.dtype if dtype is None or kept else dtype
            if source is not None and not kept:
                out_dtype = own_dtype(source, shard.name, shard.shape, piece)
            item = item_of(piece.key, piece.shape, out_dtype, quantized)
            plan.append(Outgoing(shard, piece, out_dtype, holders, writer, item))
            load[writer] = load.get(writer, 0) + sum(entry.num_bytes for entry in item)
    return plan


@torch.no_grad()
def gather(outgoing: Outgoing) -> torch.Tensor:
    """The whole tensor in its checkpoint dtype; every rank of ``holders`` calls this together."""
    shard, piece = outgoing.shard, outgoing.piece
    found = piece.overlap(shard.start, shard.extent)
    assert found is not None, "called by a rank that does not hold the tensor"
    tensor = shard.numbers(found[1]).to(outgoing.dtype)
    if isinstance(shard.tensor, DTensor):
        for axis, dim, size in _gathered_axes(shard.tensor, piece):
            tensor = _join(tensor, dim, size, shard.tensor.device_mesh.get_group(axis))
    return piece.to_stored(tensor)


def _join(local: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate parts cut as ``torch.chunk`` does; the last ones may be short or empty."""
    longest = -(-size // dist.get_world_size(group))
    missing = longest - local.shape[dim]  # gloo gathers equal sizes alone
    padded = F.pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing])
    return all_gather(padded, dim, group).narrow(dim, 0, size)


def _gathered_axes(tensor: DTensor, piece: Piece) -> list[tuple[int, int, int]]:
    """How to put a piece together: (mesh axis, dim of the HuggingFace tensor, extent when joined), in order.

    Where FSDP cuts a dim that tp or etp has already cut, its placement is strided and it is joined first.
    """
    mesh = tensor.device_mesh
    outer_first: list[tuple[int, int, int]] = []
    for dim in range(len(piece.select)):
        if piece.select[dim] is not None:
            continue
        axes = [axis for axis, placement in enumerate(tensor.placements) if _cut_dim(placement) == dim]
        axes.sort(key=lambda axis: not is_strided_shard(tensor.placements[axis]))
        assert len(axes) <= 2, "a dim is cut by FSDP and at most one other axis"
        hf_dim = dim - sum(at is not None for at in piece.select[:dim])
        extent = piece.size[hf_dim]
        for axis in reversed(axes):
            outer_first.append((axis, hf_dim, extent))
            # What the outer cut leaves of the dim on this rank is what the inner one has cut.
            longest = -(-extent // mesh.size(axis))
            extent = max(0, min(longest, extent - longest * mesh.get_local_rank(axis)))
    return outer_first[::-1]


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
        at = None if dim is None else piece.select[dim]
        if at is None or dim is None:
            index.append(slice(None))
        else:
            index.append(at // -(-tensor.shape[dim] // ranks.shape[axis]))
    return tuple(ranks[tuple(index)].flatten().tolist())


def _cut_dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) or is_strided_shard(placement) else None
