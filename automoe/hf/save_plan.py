"""Planning and writing of a checkpoint, from a live model on any mesh or from another checkpoint.

A plan lists the tensors of the checkpoint. For each tensor it gives the slices of the model's
tensors that make it up, the ranks that hold these slices and the rank that writes the tensor.
Numbers are gathered from the ranks' shards, or read from the source's files in the same way as a
rank reads its shard. One tensor of the checkpoint is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from automoe.comm.agreement import Ranks
from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed
from automoe.hf.catalog import Catalog
from automoe.hf.families.as_transformers import kept_in_float32
from automoe.hf.families.registry import family_of
from automoe.hf.files import DTYPES, Written, file_names, split, stored_as, write_files, write_index
from automoe.hf.headers import StoredTensor, are_equal, raw_bytes
from automoe.hf.keys import Encoding, KeyMap, Piece, Shape, is_quantized, our_tensors
from automoe.hf.quantized import from_codes, to_codes
from automoe.hf.read import Reader, num_not_finite
from automoe.hf.shards import LocalShard, stage_ranks
from automoe.hf.upcycle import fill_upcycled
from automoe.hf.wrapper import ALONE
from automoe.interop.torch_private import full_tensor, is_strided_shard
from automoe.model.params import find_spec


@dataclass(frozen=True)
class WriteItem:
    """Plan for one tensor of a checkpoint that is written or compared.

    Attributes:
        shards: for each of ``pieces``, this rank's shard of the model's tensor, on the meta device
            if its numbers are read from files.
        pieces: slices of the model's tensors that make up the checkpoint's tensor.
        dtype: dtype in which the numbers are gathered or read.
        holders: ranks that together hold the tensor; all of them take part in gathering it.
        writer: the holder that writes the tensor.
        target: the tensor as it is stored: dtype, shape and encoding.
    """

    shards: list[LocalShard]
    pieces: list[Piece]
    dtype: torch.dtype
    holders: tuple[int, ...]
    writer: int
    target: StoredTensor

    @property
    def key(self) -> str:
        """Name of the tensor in the checkpoint."""
        return self.pieces[0].key


def plan_writes(
    shards: list[LocalShard],
    config: ModelConfig,
    keys: KeyMap,
    dtype: torch.dtype | None = None,
    encoding: Encoding = "plain",
    source: Catalog | None = None,
) -> list[WriteItem]:
    """Plan the writing of this rank's pipeline stages; every rank of a stage returns the same plan.

    Bytes to write are spread evenly over the ranks.

    Args:
        shards: this rank's shards of the model's tensors; if a checkpoint is rewritten,
            ``unread_shards``.
        keys: layout of the checkpoint.
        dtype: dtype of the checkpoint's parameters; None keeps each parameter's dtype in ``source``
            (bfloat16 if it is quantized), or in the model if there is no source. Buffers always
            keep their dtype, and so do float32 parameters that transformers keeps in float32.
        encoding: quantize the tensors that checkpoints in this encoding quantize.
        source: checkpoint that the model was loaded from, or that is rewritten.
    """
    architecture = family_of(config).architecture
    plan = []
    load = {}
    stage = stage_ranks(shard.tensor for shard in shards)
    for shard in shards:
        made_of = [] if shard.copy else keys.pieces(shard.name, shard.shape)
        for key, group in groupby(made_of, attrgetter("key")):
            pieces = list(group)
            if plan and plan[-1].key == key:  # gates and ups of one matrix
                plan[-1].shards.extend([shard] * len(pieces))
                plan[-1].pieces.extend(pieces)
                continue
            holders = stage
            if isinstance(shard.tensor, DTensor):
                # The mesh of a tensor lacks an axis (tp) that does not shard it, so each coordinate
                # of this axis has a copy; the first one's is written. On an axis that shards a dim
                # which is not stored, holders have the coordinate of the piece's index.
                ranks = shard.tensor.device_mesh.mesh
                ranks = ranks - (ranks.min() - stage[0])
                for axis, placement in enumerate(shard.tensor.placements):
                    dim = _cut_dim(placement)
                    if dim is not None and not any(dim in dims for dims in pieces[0].dims):
                        longest = -(-shard.tensor.shape[dim] // ranks.shape[axis])
                        ranks = ranks.narrow(axis, pieces[0].start[dim] // longest, 1)
                holders = tuple(ranks.flatten().tolist())
            writer = min(holders, key=lambda rank: (load.get(rank, 0), rank))
            quantized = is_quantized(shard.name, pieces[0], keys, encoding)
            stored = shard.dtype if source is None else own_dtype(source, shard, pieces[0])
            live = stored if shard.local.is_meta else shard.dtype
            if quantized:  # the numbers are rounded only once
                out = torch.float32 if shard.local.is_meta and live == torch.bfloat16 else live
            elif not shard.trained:
                out = live
            # transformers' pattern is for the names of its class
            elif dtype is None or (
                stored == torch.float32
                and kept_in_float32(architecture).search(
                    shard.name
                    if keys.table
                    else keys.in_memory.pieces(shard.name, shard.shape)[0].key
                )
            ):
                out = stored
            else:
                out = dtype
            shape = pieces[0].file or pieces[0].shape
            target = stored_as(shape, out, encoding if quantized else "plain")
            shards_of = [shard] * len(pieces)
            plan.append(WriteItem(shards_of, pieces, out, holders, writer, target))
            load[writer] = load.get(writer, 0) + target.total_bytes
    return plan


def unread_shards(config: ModelConfig) -> list[LocalShard]:
    """Return a shard for each tensor of the model, as if this rank had all: the whole tensor, on meta.

    The tensors' numbers will be read from files.
    """
    shards = []
    for name, shape in our_tensors(config):
        whole = torch.empty(shape, device="meta")
        spec = find_spec(name)
        trained = spec is None or spec.kind != "buffer"
        shards.append(LocalShard(name, whole, whole, (0,) * len(shape), trained=trained))
    return shards


def own_dtype(catalog: Catalog, shard: LocalShard, piece: Piece) -> torch.dtype:
    """Return the dtype in which a checkpoint stores a slice of a tensor, or bfloat16 if quantized.

    If a slice spans several stored tensors, the first of them decides. If the checkpoint lacks the
    tensor, the checkpoint's first tensor decides.

    Args:
        catalog: catalog of the checkpoint.
        shard: shard of a tensor of the model; only name and full shape are used.
        piece: the slice of that tensor.
    """
    first = piece.start[0]
    pieces = catalog.keys.pieces(shard.name, shard.shape, range(first, first + 1))
    # Tensors that upcycling adds are in no file, and copies may be missing: any dtype will do.
    stored = catalog.sources.get(pieces[0].key) if pieces else None
    source = stored or next(iter(catalog.sources.values()))
    return DTYPES[source.dtype] if source.encoding == "plain" else torch.bfloat16


@dataclass(frozen=True)
class Transfer:
    """Tensors of a checkpoint that are written to files, or compared with files, one at a time.

    Attributes:
        items: the tensors. If their shards are on the meta device (``unread_shards``), numbers are
            read from ``source``, else gathered from the ranks.
        ranks: the ranks that take part; all call each method together.
        source: checkpoint that is rewritten, or that the model was loaded from. Its names are used,
            its tensors outside the text model are copied, and its MXFP4 or INT4 codes are kept if
            they decode to the same numbers.
    """

    items: list[WriteItem]
    ranks: Ranks
    source: Catalog | None = None

    @contextmanager
    def _tensors(
        self, advance: Callable[[int], None] = lambda num_bytes: None
    ) -> Iterator[Iterator[tuple[WriteItem, Tensor]]]:
        """Context that gives an iterator over (item, whole tensor) for the tensors that this rank writes.

        If the body fails, the rank still takes part in gathering the other tensors before the error
        leaves the context, so that no other rank waits for it.

        Args:
            advance: callback that gets the number of bytes of each tensor part that was read.
        """
        rank = self.ranks.rank
        with ExitStack() as opened:
            reader = opened.enter_context(Reader(self.source, advance)) if self._reads else None
            get = partial(_read, reader=reader) if reader else partial(gather, rank=rank)
            made = ((item, get(item)) for item in self.items)
            try:
                yield ((item, tensor) for item, tensor in made if item.writer == rank)
            finally:
                for _ in made if self.ranks.size > 1 else ():
                    pass

    @property
    def _reads(self) -> bool:
        return any(item.shards[0].local.is_meta for item in self.items)

    @torch.no_grad()
    def write(
        self,
        folder: Path,
        max_shard_bytes: int = 5 << 30,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> Written:
        """Write this transfer's tensors to ``folder`` as safetensors files. Collective.

        Several files get an index. Returns numbers of tensors, files and bytes.

        Args:
            max_shard_bytes: largest file, unless one tensor alone is larger.
            advance: callback that gets the number of bytes of each tensor part that was read.
        """
        source, ranks = self.source, self.ranks
        names, beside = (source.names, source.beside) if source else (ALONE, {})
        copied = ranks.share({key: stored.num_bytes for key, stored in beside.items()})
        written = {
            names.stored(item.key): item.target for item in self.items if item.writer == ranks.rank
        } | {key: beside[key] for key in copied}
        mine = split(written.items(), max_shard_bytes)
        everyone = ranks.all(lambda: mine)
        files = [contents for theirs in everyone for contents in theirs]
        first = sum(len(theirs) for theirs in everyone[: ranks.rank])
        paths = [folder / name for name in file_names(len(files))[first : first + len(mine)]]

        def stream() -> None:
            with self._tensors(advance) as made:
                tensors = (self.stored(item, tensor) for item, tensor in made)
                others = ((bytes_of(source, beside[key]),) for key in copied)
                write_files(zip(paths, mine, strict=True), chain(tensors, others))

        ranks.all(stream)
        dtype = next(item.dtype for item in self.items if item.shards[0].trained)
        done = ranks.lead(lambda: write_index(folder, files, dtype))
        return replace(done, num_copied=len(beside))

    def stored(self, item: WriteItem, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what a file stores for ``tensor``, in the file's dtypes: itself, or codes and scales.

        Exports, and streams of weights to inference engines, both call this.

        Args:
            tensor: the item's whole checkpoint tensor.
        """
        parts = item.target.in_file(item.key).values()
        return [
            part.to(DTYPES[place.dtype])
            for part, place in zip(_encoded(item, tensor, self.source), parts, strict=True)
        ]

    @torch.no_grad()
    def compare(self, written: Catalog) -> float:
        """Compare the numbers in written files with the tensors that should be in them. Collective.

        Quantized numbers must equal the tensors' numbers after quantization.

        Args:
            written: catalog of the written directory.

        Returns:
            Relative quantization error (L2) over all quantized tensors; 0 if there are none.

        Raises:
            CheckpointError: names the first tensor that is not finite, differs, or has a relative
                quantization error above one half.
        """
        origin = self.source.folder if self._reads else "the model"

        def compare() -> tuple[float, float]:
            error = size = 0.0
            with Reader(written) as reader, self._tensors() as made:
                for item, tensor in made:
                    wanted = decoded = tensor.cpu()
                    numbers = _read(item, reader)
                    if odd := num_not_finite(wanted) or num_not_finite(numbers):
                        raise not_exported(origin, item.key, odd)
                    encoding = item.target.encoding
                    if encoding != "plain":
                        decoded = from_codes(_encoded(item, wanted, self.source), encoding)
                    if not torch.equal(decoded.to(numbers.dtype), numbers):
                        raise CheckpointError(
                            f"{written.folder}: {item.key} is not what {origin} holds: "
                            f"{int((decoded.to(numbers.dtype) != numbers).sum())} of {numbers.numel()} numbers differ"
                        )
                    if encoding != "plain":
                        off, square = _square(decoded.sub_(wanted)), _square(wanted)
                        if off > square / 4:
                            raise CheckpointError(
                                f"{item.key} of {origin} cannot be stored in {encoding.upper()}: its numbers are "
                                f"{math.sqrt(off / square):.0%} off. Export it in bfloat16"
                            )
                        error += off
                        size += square
            return error, size

        errors, sizes = zip(*self.ranks.all(compare), strict=True)
        return math.sqrt(sum(errors) / (sum(sizes) or 1.0))


def _encoded(item: WriteItem, tensor: Tensor, source: Catalog | None) -> tuple[Tensor, ...]:
    new, old = item.target, source and source.sources.get(item.key)
    old_parts = []
    if source and old and old.scales and new.scales and new.encoding != "fp8":
        old_form = (old.encoding, *old.scales[1:3], old.scales.scales)
        if old_form == (new.encoding, *new.scales[1:3], None):
            for part in (old, old.scales):
                old_parts.append(bytes_of(source, part).view(DTYPES[part.dtype]).view(part.shape))
    return to_codes(tensor, new.encoding, old_parts)


def bytes_of(source: Catalog, stored: StoredTensor) -> Tensor:
    """Return the bytes of the tensor ``stored``, read from the files of ``source``, as uint8 [n]."""
    raw = bytearray().join(raw_bytes(source.folder, stored))
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def compare_beside(source: Catalog, written: Catalog, keys: Iterable[str]) -> None:
    """Check that ``written`` has the tensors outside the text model that ``source`` has.

    Args:
        keys: names of the tensors whose bytes this process compares.

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
    """Return the error for an export of NaN or infinite weights.

    Args:
        folder: directory that the numbers are read from, or a name of their source.
        key: name of a tensor with such numbers.
        count: how many of them it has.
    """
    return CheckpointError(
        f"{folder}: {count:,} numbers of {key} are NaN or infinite, and an export must be finite. Correct them, or "
        "export an earlier checkpoint"
    )


def _read(item: WriteItem, reader: Reader) -> Tensor:
    """Return the tensor of ``item``, read slice by slice from the files of ``reader``."""
    stored = torch.zeros(item.pieces[0].shape, dtype=item.dtype)
    for of, piece in zip(item.shards, item.pieces, strict=True):
        full = torch.empty(of.shape, device="meta")
        shard = LocalShard(of.name, full, piece.within(stored).view(piece.size), piece.start)
        reader.fill(reader.plan([shard]))
        fill_upcycled(shard, reader.catalog.keys)
    return stored.view(item.pieces[0].file or stored.shape)


# Gathering ----------------------------------------------------------------------------------------


@torch.no_grad()
def gather(item: WriteItem, rank: int) -> Tensor | None:
    """Return the whole checkpoint tensor that ``item`` plans; None on ranks that hold no part of it.

    Collective over the ranks of the item's pipeline stage.

    Args:
        rank: this rank.
    """
    stored = None
    for shard in {id(shard): shard for shard in item.shards}.values():
        if shard.added:
            shard.added()
    if rank not in item.holders:
        return None
    for shard, piece in zip(item.shards, item.pieces, strict=True):
        # Dims that are stored are gathered whole, and then cut.
        index = [
            slice(None) if isinstance(at, slice) else slice(at - first, at - first + 1)
            for at, first in zip(piece.box, shard.start, strict=True)
        ]
        part = shard.numbers(tuple(index)).to(item.dtype)
        if isinstance(shard.tensor, DTensor):
            part = _gather_stored(part, shard.tensor, shard.shape, piece)
        part = part[tuple(at if isinstance(at, slice) else 0 for at in piece.box)]
        if part.numel() == math.prod(piece.shape):
            return piece.in_stored_order(part).reshape(piece.shape)
        stored = part.new_zeros(piece.shape) if stored is None else stored
        piece.within(stored).copy_(part)
    return stored if stored is None else stored.view(item.pieces[0].file or stored.shape)


def _gather_stored(part: Tensor, tensor: DTensor, shape: Shape, piece: Piece) -> Tensor:
    """Gather a slice of a parameter over the mesh axes that shard dims of the stored tensor.

    The result is whole on these dims, and has size 1 on all others.

    Args:
        part: this rank's slice of the parameter; its size is 1 on dims that the HuggingFace tensor
            does not have, such as the expert.
        tensor: the parameter, whose placements say which axis shards which dim.
        shape: full shape of the parameter.
        piece: the slice in the parameter, and the HuggingFace tensor that stores it.
    """
    stored = {*chain.from_iterable(piece.dims)}
    axes = [axis for axis, by in enumerate(tensor.placements) if _cut_dim(by) in stored]
    names = tensor.device_mesh.mesh_dim_names
    if not axes or names is None:
        return part
    full = torch.empty(
        [size if dim in stored else 1 for dim, size in enumerate(shape)], device="meta"
    )
    return full_tensor(
        DTensor.from_local(
            part,
            tensor.device_mesh[tuple(names[axis] for axis in axes)],
            [tensor.placements[axis] for axis in axes],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
    )


def _cut_dim(placement: Placement) -> int | None:
    # The strided placement is not a subclass of Shard in every torch.
    return placement.dim if isinstance(placement, Shard) or is_strided_shard(placement) else None
