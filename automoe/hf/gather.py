"""One HuggingFace tensor at a time out of a sharded model: who holds it, who writes it, how it is put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from automoe.hf.keys import KeyMap, Piece, hf_pieces
from automoe.hf.shard_files import Item, is_quantized_in_fp8, item_of
from automoe.hf.shards import LocalShard, Parts, local_shards


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
    everyone = _ranks_of(parts)
    for shard in local_shards(parts):
        if shard.copy:
            continue
        for piece in hf_pieces(shard.name, tuple(shard.tensor.shape), keys):
            holders = everyone
            if isinstance(shard.tensor, DTensor):
                holders = _holders(shard.tensor, piece, first=everyone[0])
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


def _ranks_of(parts: Parts) -> tuple[int, ...]:
    """Ranks that hold the same stages, in order: those of the largest mesh that a tensor lies on."""
    meshes = [shard.tensor.device_mesh.mesh for shard in local_shards(parts) if isinstance(shard.tensor, DTensor)]
    if not meshes:
        return (0,)  # no mesh: the first rank's copy of the model counts
    return tuple(sorted(max(meshes, key=lambda mesh: mesh.numel()).flatten().tolist()))
