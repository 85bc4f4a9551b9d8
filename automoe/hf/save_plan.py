"""Planning and writing of a checkpoint, from a live model on any mesh or from another checkpoint.

A plan lists the tensors of the checkpoint. For each tensor it gives the slices of the model's
tensors that make it up, the ranks that hold these slices and the rank that writes the tensor.
Numbers are gathered from the ranks' shards, or read from the source's files in the same way as a
rank reads its shard. One tensor of the checkpoint is in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from automoe.comm.agreement import Ranks
from automoe.comm.collectives import all_gather
from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed
from automoe.hf.catalog import Catalog
from automoe.hf.families.as_transformers import kept_in_float32
from automoe.hf.families.registry import family_of
from automoe.hf.files import DTYPES, Written, file_names, split, stored_as, write_files, write_index
from automoe.hf.headers import StoredTensor, are_equal, raw_bytes
from automoe.hf.keys import Encoding, KeyMap, Piece, is_quantized, our_tensors
from automoe.hf.quantized import from_codes, to_codes
from automoe.hf.read import Reader, num_not_finite
from automoe.hf.shards import LocalShard, stage_ranks
from automoe.hf.upcycle import fill_upcycled
from automoe.interop.torch_private import is_strided_shard
from automoe.model.wrapper import ALONE


@dataclass(frozen=True)
class WriteItem:
    """Plan for one tensor of the checkpoint.

    Attributes:
        shard: this rank's part of the model's tensor, on the meta device if its numbers are read
            from files.
        pieces: slices of the model's tensor that make up the checkpoint's tensor.
        dtype: dtype in which the numbers are gathered or read.
        holders: ranks that together hold the tensor; all of them take part in gathering it.
        writer: the holder that writes the tensor.
        target: the tensor as it is stored.
    """

    shard: LocalShard
    pieces: list[Piece]
    dtype: torch.dtype
    holders: tuple[int, ...]
    writer: int
    target: StoredTensor

    @property
    def key(self) -> str:
        """Name in the checkpoint."""
        return self.pieces[0].key


def plan_writes(
    shards: list[LocalShard],
    keys: KeyMap,
    dtype: torch.dtype | None,
    encoding: Encoding = "plain",
    source: Catalog | None = None,
    wide: re.Pattern[str] | None = None,
) -> list[WriteItem]:
    """Plan the tensors of this rank's stages; every rank of a stage returns the same plan.

    Bytes to write are spread evenly over the ranks.

    Args:
        shards: this rank's parts of the model's tensors.
        keys: layout of the checkpoint.
        dtype: dtype of the checkpoint's parameters; None keeps each parameter's dtype in
            ``source``, or in the model if there is no source. Buffers always keep their dtype.
        encoding: quantize the tensors that checkpoints in this encoding quantize.
        source: checkpoint that the model was loaded from.
        wide: keys that match this pattern and are float32 stay float32 (``kept_in_float32``).
    """
    plan = []
    load = {}
    stage = stage_ranks(shard.tensor for shard in shards)
    for shard in shards:
        made_of = [] if shard.copy else keys.pieces(shard.name, shard.shape)
        for key, group in groupby(made_of, attrgetter("key")):
            pieces = list(group)
            holders = stage
            if isinstance(shard.tensor, DTensor):
                holders = _holders(shard.tensor, pieces[0], first=stage[0])
            writer = min(holders, key=lambda rank: (load.get(rank, 0), rank))
            quantized = is_quantized(shard.name, pieces[0], keys, encoding)
            stored = shard.dtype if source is None else own_dtype(source, shard, pieces[0])
            own = stored if shard.local.is_meta else shard.dtype
            if quantized:  # the numbers are rounded only once
                out = torch.float32 if shard.local.is_meta and own == torch.bfloat16 else own
            elif not shard.trained:
                out = own
            elif wide and stored == torch.float32 and wide.search(key):
                out = stored
            else:
                out = stored if dtype is None else dtype
            target = stored_as(pieces[0].shape, out, encoding if quantized else "plain")
            plan.append(WriteItem(shard, pieces, out, holders, writer, target))
            load[writer] = load.get(writer, 0) + target.total_bytes
    return plan


def plan_rewrite(
    source: Catalog,
    config: ModelConfig,
    keys: KeyMap,
    dtype: torch.dtype | None = None,
    encoding: Encoding = "plain",
) -> list[WriteItem]:
    """Plan every tensor of ``source`` in the layout ``keys``.

    Args:
        dtype: dtype of the parameters; None keeps each parameter's dtype, and gives quantized ones
            bfloat16.
    """
    shards = []
    for name, shape in our_tensors(config):
        whole = torch.empty(shape, device="meta")
        trained = not name.endswith(".expert_bias")
        shards.append(LocalShard(name, whole, whole, (0,) * len(shape), trained=trained))
    wide = kept_in_float32(family_of(config).architecture)
    return plan_writes(shards, keys, dtype, encoding, source, wide)


def own_dtype(catalog: Catalog, shard: LocalShard, piece: Piece) -> torch.dtype:
    """Return the dtype of the stored tensor that holds the first number of ``piece``.

    A quantized tensor counts as bfloat16.
    """
    first = piece.start[0]
    pieces = catalog.keys.pieces(shard.name, shard.shape, range(first, first + 1))
    # Tensors that upcycling adds are in no file, and copies may be missing: any dtype will do.
    stored = catalog.sources.get(pieces[0].key) if pieces else None
    source = stored or next(iter(catalog.sources.values()))
    return DTYPES[source.dtype] if source.encoding == "plain" else torch.bfloat16


# Writing ------------------------------------------------------------------------------------------


def write_tensors(
    plan: list[WriteItem],
    make: Callable[[WriteItem], torch.Tensor],
    ranks: Ranks,
    folder: Path,
    max_shard_bytes: int,
    source: Catalog | None = None,
) -> Written:
    """Write the tensors of ``plan`` to safetensors files, with an index if there are several files.

    Collective over ``ranks``.

    Args:
        make: function that returns the whole tensor of an item; all holders of the item call it, in
            the order of the plan.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        source: checkpoint that the model was loaded from. Its names are used, its other parts are
            copied, and its MXFP4 or INT4 codes are kept if they decode to the same numbers.
    """
    names, beside = (source.names, source.beside) if source else (ALONE, {})
    copied = ranks.share({key: stored.num_bytes for key, stored in beside.items()})
    written = {
        names.stored(item.key): item.target for item in plan if item.writer == ranks.rank
    } | {key: beside[key] for key in copied}
    mine = split(written.items(), max_shard_bytes)
    everyone = ranks.all(lambda: mine)
    files = [contents for theirs in everyone for contents in theirs]
    first = sum(len(theirs) for theirs in everyone[: ranks.rank])
    names = file_names(len(files))[first : first + len(mine)]
    paths = [folder / name for name in names]

    def stream() -> None:
        with _made(plan, make, ranks) as made:
            tensors = (_encoded(item, tensor, source) for item, tensor in made)
            others = ((_bytes_of(source, beside[key]),) for key in copied if source is not None)
            write_files(zip(paths, mine, strict=True), chain(tensors, others))

    ranks.all(stream)
    dtype = next(item.dtype for item in plan if item.shard.trained)
    done = ranks.lead(lambda: write_index(folder, files, dtype))
    return replace(done, num_copied=len(beside))


@contextmanager
def _made(
    plan: list[WriteItem], make: Callable[[WriteItem], torch.Tensor], ranks: Ranks
) -> Iterator[Iterator[tuple[WriteItem, torch.Tensor]]]:
    """Yield an iterator over this rank's items to write, each with its whole tensor.

    A rank that fails still takes part in gathering; its error is raised at the end.
    """
    made = ((item, make(item)) for item in plan if ranks.rank in item.holders)
    try:
        yield ((item, tensor) for item, tensor in made if item.writer == ranks.rank)
    finally:
        for _ in made if ranks.size > 1 else ():
            pass


def _encoded(
    item: WriteItem, tensor: torch.Tensor, source: Catalog | None
) -> tuple[torch.Tensor, ...]:
    new, old = item.target, source and source.sources.get(item.key)
    if not (
        source and old and old.scales and new.scales and new.encoding != "fp8"
        and (old.encoding, old.scales.dtype) == (new.encoding, new.scales.dtype)
    ):  # fmt: skip
        return to_codes(tensor, new.encoding)
    kept = (
        _bytes_of(source, one).view(DTYPES[one.dtype]).view(one.shape) for one in (old, old.scales)
    )
    return to_codes(tensor, new.encoding, tuple(kept))


def _bytes_of(source: Catalog, stored: StoredTensor) -> torch.Tensor:
    try:
        raw = bytearray(b"".join(raw_bytes(source.folder, stored)))
    except OSError as error:
        raise CheckpointError(
            f"{source.folder / stored.file} cannot be read ({error.strerror}). Copy the file again"
        ) from error
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


@torch.no_grad()
def rewrite_tensors(
    plan: list[WriteItem],
    source: Catalog,
    folder: Path,
    max_shard_bytes: int = 5 << 30,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Written:
    """Write the tensors of ``plan`` in this process alone, from the files of ``source``.

    Args:
        advance: callback that receives the number of bytes of each read.
    """
    with Reader(source, advance) as reader:
        return write_tensors(
            plan,
            lambda item: _read(item, reader),
            Ranks(alone=True),
            folder,
            max_shard_bytes,
            source,
        )


def compare_rewritten(plan: list[WriteItem], source: Catalog, written: Catalog) -> float:
    """Compare every number in the files of ``written`` with its number in ``source``.

    Returns:
        As ``compare_written``.

    Raises:
        CheckpointError: names the first tensor that is not finite, or that differs from the
            source's numbers in the encoding of ``written``.
    """
    compare_beside(source, written, source.beside)
    with Reader(source) as reader:
        return compare_written(
            plan,
            lambda item: _read(item, reader),
            Ranks(alone=True),
            written,
            source,
            source.folder,
        )


@torch.no_grad()
def compare_written(
    plan: list[WriteItem],
    make: Callable[[WriteItem], torch.Tensor],
    ranks: Ranks,
    written: Catalog,
    source: Catalog | None,
    origin: Path | str,
) -> float:
    """Compare the numbers in ``written`` with the tensors of ``plan``, quantized again. Collective.

    Args:
        make, source: as for ``write_tensors``.
        origin: the folder or model that the tensors were read from, for errors.

    Returns:
        Relative quantization error (L2) over all quantized tensors; 0 if there are none.

    Raises:
        CheckpointError: names the first tensor that is not finite, differs, or has a relative
            quantization error above one half.
    """

    def compare() -> tuple[float, float]:
        error = size = 0.0
        with Reader(written) as reader, _made(plan, make, ranks) as made:
            for item, numbers in made:
                wanted, found = numbers.cpu(), _read(item, reader)
                if odd := num_not_finite(wanted) or num_not_finite(found):
                    raise not_exported(origin, item.key, odd)
                decoded = wanted
                if item.target.scales is not None:
                    decoded = from_codes(_encoded(item, wanted, source), item.target.encoding)
                if not torch.equal(decoded.to(found.dtype), found):
                    raise CheckpointError(
                        f"{written.folder}: {item.key} is not what {origin} holds: "
                        f"{int((decoded.to(found.dtype) != found).sum())} of {found.numel()} numbers differ"
                    )
                if item.target.scales is not None:
                    off, own = _square(decoded.sub_(wanted)), _square(wanted)
                    if off > own / 4:
                        raise CheckpointError(
                            f"{item.key} of {origin} cannot be stored in {item.target.encoding.upper()}: its numbers are "
                            f"{math.sqrt(off / own):.0%} off. Export it in bfloat16"
                        )
                    error, size = error + off, size + own
        return error, size

    errors, sizes = zip(*ranks.all(compare), strict=True)
    return math.sqrt(sum(errors) / (sum(sizes) or 1.0))


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def compare_beside(source: Catalog, written: Catalog, keys: Iterable[str]) -> None:
    """Check that ``written`` has ``source``'s other parts, and compare the bytes of ``keys``.

    Raises:
        CheckpointError: a tensor is missing, unexpected or different.
    """
    odd = sorted(source.beside.keys() ^ written.beside.keys())
    odd += [
        key
        for key in keys
        if not odd
        and not are_equal(source.folder, source.beside[key], written.folder, written.beside[key])
    ]
    if odd:
        raise CheckpointError(
            f"{written.folder}: {listed(odd)} is not what {source.folder} holds, byte for byte"
        )


def not_exported(folder: Path, key: str, count: int) -> CheckpointError:
    """Return the error for an export of NaN or infinite weights."""
    return CheckpointError(
        f"{folder}: {count:,} numbers of {key} are NaN or infinite, and an export must be finite. Correct them, or "
        "export an earlier checkpoint"
    )


def _read(item: WriteItem, reader: Reader) -> torch.Tensor:
    """Read the tensor of ``item``, each piece like a shard that holds only this piece."""
    stored = torch.empty(item.pieces[0].shape, dtype=item.dtype)
    full = torch.empty(item.shard.shape, device="meta")
    for piece in item.pieces:
        shard = LocalShard(item.shard.name, full, piece.within(stored), piece.start)
        reader.fill(reader.plan([shard]))
        fill_upcycled(shard, reader.catalog.keys)
    return stored


# Gathering ----------------------------------------------------------------------------------------


@torch.no_grad()
def gather(item: WriteItem) -> torch.Tensor:
    """Return the whole tensor in the item's dtype. Collective over its holders."""
    stored = None
    for piece in item.pieces:
        part = _gather_piece(item, piece)
        if len(item.pieces) == 1:
            return piece.to_stored(part)
        stored = part.new_empty(piece.shape) if stored is None else stored
        piece.within(stored).copy_(part)
    return stored


def _gather_piece(item: WriteItem, piece: Piece) -> torch.Tensor:
    """Return the box of ``piece``; dims that are stored are gathered whole, and then cut."""
    shard = item.shard
    stored = [dim for dims in piece.dims for dim in dims]
    index = [slice(None)] * len(piece.start)
    for dim, at in enumerate(piece.start):
        if dim not in stored:
            index[dim] = slice(at - shard.start[dim], at - shard.start[dim] + 1)
    tensor = shard.numbers(tuple(index)).to(item.dtype)
    if isinstance(shard.tensor, DTensor):
        for axis, dim, size in _gathered_axes(shard.tensor, stored):
            tensor = _join(tensor, dim, size, shard.tensor.device_mesh.get_group(axis))
    for dim in stored:
        tensor = tensor.narrow(dim, piece.start[dim], piece.size[dim])
    return tensor


def _join(local: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather parts split as by ``torch.chunk``, the last of which may be short or empty."""
    longest = -(-size // dist.get_world_size(group))
    missing = longest - local.shape[dim]  # gloo gathers only equal sizes
    padded = F.pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing])
    return all_gather(padded, dim, group).narrow(dim, 0, size)


def _gathered_axes(tensor: DTensor, dims: list[int]) -> list[tuple[int, int, int]]:
    """List the all-gathers that complete ``dims``, in order: (mesh axis, dim, gathered size).

    If FSDP shards a dim that tp or etp has already sharded, FSDP's placement is strided and is
    gathered first.
    """
    mesh = tensor.device_mesh
    outer_first = []
    for dim in dims:
        extent = tensor.shape[dim]
        axes = [axis for axis, one in enumerate(tensor.placements) if _cut_dim(one) == dim]
        for axis in sorted(axes, key=lambda axis: is_strided_shard(tensor.placements[axis])):
            outer_first.append((axis, dim, extent))
            # The inner axis shards this rank's slice of the outer axis.
            longest = -(-extent // mesh.size(axis))
            extent = max(0, min(longest, extent - longest * mesh.get_local_rank(axis)))
    return outer_first[::-1]


def _holders(tensor: DTensor, piece: Piece, first: int) -> tuple[int, ...]:
    """Return the ranks that hold the piece.

    On a mesh axis that shards a dim which is not stored, these ranks have the coordinate of the
    piece's index.

    Args:
        first: lowest rank of the stage. The mesh of a tensor lacks an axis (tp) that does not shard
            it, so each coordinate of this axis has a copy; the first coordinate's is written.
    """
    ranks = tensor.device_mesh.mesh
    ranks = ranks - (ranks.min() - first)
    for axis, placement in enumerate(tensor.placements):
        dim = _cut_dim(placement)
        if dim is not None and not any(dim in dims for dims in piece.dims):
            longest = -(-tensor.shape[dim] // ranks.shape[axis])
            ranks = ranks.narrow(axis, piece.start[dim] // longest, 1)
    return tuple(ranks.flatten().tolist())


def _cut_dim(placement: Placement) -> int | None:
    # The strided placement is not a subclass of Shard in every torch.
    return placement.dim if isinstance(placement, Shard) or is_strided_shard(placement) else None
