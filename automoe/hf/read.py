"""Loading of HuggingFace safetensors into the shards of a model on any mesh.

Rank 0 parses the headers once and checks the whole checkpoint against the model. Every rank then
reads the byte ranges of its own shards, in file order, straight into them. Of ranks of a machine
that need the same byte, all but the first get it from the page cache. No rank holds a sharded tensor.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from automoe.comm.agreement import Ranks
from automoe.config.convert import written
from automoe.errors import CheckpointError, listed, retried
from automoe.hf.catalog import Catalog, open_catalog
from automoe.hf.files import DTYPES
from automoe.hf.headers import StoredTensor, without_collection
from automoe.hf.keys import EMBEDDING, HEAD, KeyMap, Piece
from automoe.hf.quantized import dequantize, unpack_integers
from automoe.hf.schemes import FORMATS
from automoe.hf.shards import LocalShard, Parts, as_parts, check_tables, config_of, local_shards
from automoe.hf.upcycle import fill_upcycled
from automoe.model.causal_lm import CausalLM
from automoe.model.init import reset_buffers
from automoe.quantize.packed import pack_fp8, pack_nf4, unpack
from automoe.storage.foreign import open_inside

# Bytes read at once if numbers are converted: this is the only scratch memory.
CHUNK_BYTES = 2 << 20
# Bytes read at once straight into a parameter: progress is shown after each read.
DIRECT_BYTES = 64 << 20
# Fewer unwanted bytes in a row are read along: a call per row takes as long as copying so many.
GAP_BYTES = 8 << 10
Span = tuple[int, int]  # half-open range


@dataclass(frozen=True)
class Loaded:
    """Result of ``load_hf``: of all ranks that load together, or of a rank that loads alone.

    Attributes:
        path: the checkpoint directory.
        bytes_read: bytes read from files, summed over the ranks.
        seconds: time of the slowest rank.
        granularity: number of experts that share a copy of the dense FFN; 0 if not upcycled.
        not_finite: count of NaN and infinite values by the tensor's name in the files; tensors without any are left
            out.
        notes: sentences for the user about the checkpoint (``Catalog.notes``).
    """

    path: Path
    bytes_read: int
    seconds: float
    granularity: int
    not_finite: dict[str, int]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9) / 1e9
        text = f"{self.path}: read {self.bytes_read / 1e9:,.3g} GB in {self.seconds:,.1f} s ({rate:,.2g} GB/s)"
        if self.granularity:
            text = f"upcycled with granularity {self.granularity} from {text}"
        if self.not_finite:
            where = listed(f"{key} ({count:,})" for key, count in self.not_finite.items())
            text += f"; WARNING: {sum(self.not_finite.values()):,} of its numbers are NaN or infinite: {where}"
        return "; ".join((text, *self.notes))


def load_hf(
    parts: Parts | CausalLM,
    path: str | Path,
    catalog: Catalog | None = None,
    *,
    keys: KeyMap | None = None,
    progress: bool = False,
) -> Loaded:
    """Fill a model, or this rank's pipeline stages of it, from a checkpoint directory.

    Return what was read: bytes, seconds, and NaN and infinite values by tensor (``Loaded``). Collective, unless
    ``catalog`` is given.

    Parameters may be DTensors on the dense mesh or on the mesh of the experts. They need storage (``to_empty``) but no
    values; buffers that a checkpoint does not hold are initialised. Rows of embedding and head that the checkpoint
    lacks become the mean of the rows that it has. Numbers are converted to each parameter's dtype. Quantized tensors
    are dequantized while they are read.

    Args:
        catalog: list of the directory's tensors (``check_catalog``). With it this rank reads alone, and the result
            counts this rank's reads only. None: rank 0 makes it and broadcasts it.
        keys: map of tensor names that ``upcycled_model`` returns, if ``path`` is dense and the model is a mixture;
            default: that of the model's family.
        progress: show a progress bar on rank 0 if stderr is a terminal.

    Raises:
        CheckpointError, on every rank: a file is missing, truncated or a Git LFS pointer; keys are missing or
            unexpected; a shape or the number of experts differs; FP8 codes have no scales.
    """
    started = time.perf_counter()
    parts = as_parts(parts)
    for part in parts.values():
        reset_buffers(part)
    ranks = Ranks(alone=catalog is not None)
    with torch.no_grad(), Reader(catalog or open_catalog(path, config_of(parts), keys)) as reader:
        everything = list(local_shards(parts))
        shards = [shard for shard in everything if not shard.again]
        rounded = [shard for shard in shards if shard.base == "nf4"]
        direct = [shard for shard in shards if shard.base != "nf4"]
        keys, rows = reader.catalog.keys, config_of(parts).vocab_size
        there = ((key, reader.catalog.sources.get(keys.renamed(key))) for key in (EMBEDDING, HEAD))
        grown = [key for key, stored in there if stored and stored.shape[0] < rows]
        means = ranks.lead(lambda: dict(map(reader.mean_row, grown))) if grown else {}

        def fill() -> tuple[int, float, dict[tuple[Any, ...], int]]:
            items = reader.plan(direct)
            total = sum(item.num_bytes(item.place) for item in items)
            # Most checkpoints have bfloat16 where the base is rounded to NF4.
            total += sum(2 * math.prod(shard.extent) for shard in rounded)
            shown = progress and ranks.rank == 0
            with show_progress(Path(path).name, total, shown) as reader.advance:
                reader.fill(items)
                odd = _not_finite(items)
                for shard in rounded:  # one matrix at a time
                    for index, matrix in shard.matrices():
                        items = reader.plan([matrix])
                        reader.fill(items)
                        odd |= _not_finite(items)
                        packed = shard.local[index]
                        packed.copy_(pack_nf4(matrix.local.to(packed.device)))
            for shard in shards:
                fill_upcycled(shard, reader.catalog.keys)
                if shard.name in means:
                    mean, known = means[shard.name]
                    shard.local[max(0, known - shard.start[0]) :] = mean
            check_tables(shards, reader.catalog.folder, keys, config_of(parts).num_experts)
            _check_copies(reader, [shard for shard in everything if shard.again])
            return reader.bytes_read, time.perf_counter() - started, odd

        read, seconds, odd = zip(*ranks.all(fill), strict=True)
    not_finite = Counter()
    # Several ranks may hold the same slice: it is counted once.
    for (key, *_), count in {
        place: count for places in odd for place, count in places.items()
    }.items():
        not_finite[key] += count
    source = written(path) if isinstance(path, str) else path
    granularity, notes = reader.catalog.keys.ffn_parts, reader.catalog.notes
    return Loaded(Path(source), sum(read), max(seconds), granularity, not_finite, notes)


def _check_copies(reader: Reader, copies: list[LocalShard]) -> None:
    """Raise ``CheckpointError`` if a stored copy of embedding or head differs from the original.

    Files may repeat both for modules for multi-token prediction.

    Args:
        copies: shards of the copies, filled with the original's numbers; ``reader`` reads what is stored.
    """
    catalog = reader.catalog
    there = [
        copy
        for copy in copies
        if catalog.keys.pieces(copy.name, copy.shape)[0].key in catalog.sources
    ]

    def compare(item: ReadItem, numbers: Tensor, place: Tensor) -> None:
        if not torch.equal(numbers.to(place.dtype), place.cpu()):
            raise CheckpointError(
                f"{catalog.folder}: {item.key} differs from the model's own tensor, which modules for "
                "multi-token prediction share. Set model.num_mtp_layers=0"
            )

    reader.visit(reader.plan(there), compare)


def _not_finite(items: list[ReadItem]) -> dict[tuple[Any, ...], int]:
    """Return the number of NaN and infinite values in each slice that ``items`` read, of slices that have any.

    A key is (key of the stored tensor, its half-open ranges of matrices, of rows, of columns).
    """
    counts = {}
    for item in items:
        numbers = unpack(item.place, item.cols[1] - item.cols[0], torch.float32)
        if count := num_not_finite(numbers):
            counts[item.key, item.matrices, item.rows, item.cols] = count
    return counts


def is_finite(tensor: Tensor) -> bool:
    """Return True if no number is NaN or infinite, in one pass and without a temporary tensor."""
    return tensor.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def num_not_finite(tensor: Tensor) -> int:
    """Return the number of NaN and infinite values."""
    return 0 if is_finite(tensor) else int((~torch.isfinite(tensor)).sum())


class ReadItem(NamedTuple):
    """Slice of a stored tensor, together with the slice of a shard that it fills.

    A stored tensor is treated as a stack of matrices, and a vector as a matrix with one column.

    Attributes:
        shard: this rank's shard of a model tensor, which the slice fills.
        key: name of the stored tensor.
        source: the stored tensor.
        matrices, rows, cols: half-open ranges in the stored tensor.
        place: view of the shard, [matrices, rows, columns] in stored order; rows or columns may span two dims.
        row_unit: number of stored rows per index of ``place``'s dim 1; 1 unless rows span two dims.
    """

    shard: LocalShard
    key: str
    source: StoredTensor
    matrices: Span
    rows: Span
    cols: Span
    place: Tensor
    row_unit: int

    @property
    def wanted(self) -> Span:
        """Bytes [from, to) of a stored row that hold the columns ``cols``; elements that pack several stay whole."""
        left, right = self.cols
        size = DTYPES[self.source.dtype].itemsize
        packed = 1 if self.source.encoding == "plain" else FORMATS[self.source.encoding].packed
        return left // packed * size, -(-right // packed) * size

    @property
    def fetched(self) -> Span:
        """Half-open range of the bytes to read from each stored row: those of ``cols`` (``wanted``), or the whole row.

        Whole rows take fewer reads, so they are read if that costs few bytes.
        """
        begin, end = self.wanted
        _, row_bytes = self.source.row_layout
        return (0, row_bytes) if row_bytes - (end - begin) < GAP_BYTES else (begin, end)

    def num_bytes(self, place: Tensor) -> int:
        """Return how many bytes of the file, without scales, fill ``place``, a slice of ``self.place``."""
        return place.numel() * self.source.num_bytes // math.prod(self.source.full_shape)

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, int, int, Tensor]]:
        """Split the read into chunks of rows of one matrix, about ``max_bytes`` of the file each.

        Yields (index of the matrix in the stored tensor, first and end row in that matrix, slice of
        ``place`` to fill: [rows / ``self.row_unit``, columns]).
        """
        first, last = self.fetched
        step = max(1, max_bytes // (last - first) // self.row_unit) * self.row_unit
        for matrix in range(*self.matrices):
            for begin in range(*self.rows, step):
                end = min(begin + step, self.rows[1])
                first, last = ((row - self.rows[0]) // self.row_unit for row in (begin, end))
                yield matrix, begin, end, self.place[matrix - self.matrices[0], first:last]


def _read_item(shard: LocalShard, piece: Piece, source: StoredTensor) -> ReadItem | None:
    """Return the read of a stored tensor that fills a shard; None if the two do not overlap.

    Args:
        shard: this rank's shard of one of the model's tensors.
        piece: slice of that tensor, and where the HuggingFace tensor stores it.
        source: the stored HuggingFace tensor. ``CheckpointError`` if it is not block-FP8 and the shard keeps packed FP8
            codes.
    """
    overlap = piece.overlap(shard.start, shard.extent)
    if overlap is None:
        return None
    if shard.base and source.encoding != "fp8":
        raise CheckpointError(
            f"lora.base={shard.base} keeps matrices as the checkpoint stores them, in block-FP8, and {piece.key} is "
            f"{source.dtype} ({source.encoding}). Set lora.base=nf4 or weights"
        )
    spans = [(part.start, part.stop) for part in overlap[0]]
    place = piece.in_stored_order(shard.local[overlap[1]])
    while len(spans) > 3:  # such as [1, 1, heads, 1]
        assert spans.pop(0) == (0, 1), (piece.key, source.shape)
        place = place.squeeze(0)
    if len(spans) == 1:
        spans = [*spans, (0, 1)]
        place = place.unsqueeze(1)
    if len(spans) == 2:
        spans = [(0, 1), *spans]
        place = place.unsqueeze(0)
    matrices, rows, cols = spans
    if source.encoding != "mxfp4":
        return ReadItem(shard, piece.key, source, matrices, rows, cols, place, 1)
    # MXFP4 stores the last two dims transposed: [..., columns, groups of rows, 16 bytes].
    place = place.movedim(1, -1)
    unit = place.shape[2] if place.dim() > 3 else 1
    return ReadItem(shard, piece.key, source, matrices, cols, rows, place, unit)


@dataclass
class Reader:
    """Context that reads slices of a catalog's tensors and keeps their files open until its end.

    Attributes:
        catalog: list of the tensors, which says where each is stored.
        bytes_read: bytes read from files so far.
        advance: callback that gets the number of stored bytes of each chunk, once it is copied.
    """

    catalog: Catalog
    advance: Callable[[int], None] = lambda num_bytes: None
    bytes_read: int = 0
    _open: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._open.values():
            os.close(handle)

    @without_collection()
    def plan(self, shards: Iterable[LocalShard]) -> list[ReadItem]:
        """Plan the reads that fill ``shards``, in file order; ``CheckpointError`` if an FP8 shard is not stored so."""
        items = []
        for shard in shards:
            if shard.local.numel() == 0:  # a dim shorter than its mesh axis leaves some ranks empty
                continue
            experts = range(shard.start[0], shard.start[0] + shard.local.shape[0])
            for piece in self.catalog.keys.pieces(shard.name, shard.shape, experts):
                source = self.catalog.sources[piece.key]
                if piece.file:
                    assert source.encoding == "plain"
                    source = source._replace(shape=piece.shape)
                if source.shape[:1] < piece.shape[:1]:  # the model's vocabulary is larger
                    piece = piece._replace(size=source.shape)
                if item := _read_item(shard, piece, source):
                    items.append(item)
        return sorted(items, key=lambda item: (item.source.file, item.source.start))

    def mean_row(self, key: str) -> tuple[str, tuple[Tensor, int]]:
        """Return (our name of the embedding or head ``key``, (mean of its stored rows, [H] float64, number of rows)).

        Rows are added in order: the result does not depend on threads.
        """
        rows, columns = self.catalog.sources[self.catalog.keys.renamed(key)].shape
        name = key.removeprefix("model.")
        whole, total = torch.empty(rows, columns, device="meta"), torch.zeros(columns).double()

        def add(_item: ReadItem, numbers: Tensor, _place: Tensor) -> None:
            total.add_(numbers.double().cumsum(0)[-1])

        self.visit(self.plan([LocalShard(name, whole, whole, (0, 0))]), add)
        return name, (total / rows, rows)

    def fill(self, items: Iterable[ReadItem]) -> None:
        """Read every item into the slice of the shard that it fills.

        Raises ``CheckpointError`` if a file is missing, shorter or unreadable by now.
        """
        for item in items:
            place = item.place
            if (  # stored bytes equal the parameter's: no buffer is needed
                item.source.encoding == "plain"
                and place.dtype == DTYPES[item.source.dtype]
                and place.device.type == "cpu"
                and place[0].is_contiguous()
                and item.fetched == item.wanted
            ):
                for matrix, begin, end, part in item.chunks(DIRECT_BYTES):
                    self._read(item, matrix, begin, end, part.view(-1).view(torch.uint8))
                    self.advance(item.num_bytes(part))
            else:
                self.visit([item], lambda _, numbers, part: part.copy_(numbers))

    def visit(
        self, items: Iterable[ReadItem], use: Callable[[ReadItem, Tensor, Tensor], object]
    ) -> None:
        """Read a few rows at a time, and call ``use(item, numbers, place)`` with each.

        ``place`` is the part of the item's shard that the rows belong to, and ``numbers`` are the
        rows in the same shape: on the CPU, in the checkpoint's dtype, or float32 if the checkpoint
        is quantized.

        Raises ``CheckpointError`` if a file is missing, shorter or unreadable by now.
        """
        for item in items:
            for matrix, begin, end, part in item.chunks(CHUNK_BYTES):
                use(item, self._numbers(item, matrix, begin, end).view(part.shape), part)
                self.advance(item.num_bytes(part))

    def _numbers(self, item: ReadItem, matrix: int, begin: int, end: int) -> Tensor:
        """Return rows ``begin`` to ``end`` of matrix (expert) ``matrix``, dequantized: [rows, columns].

        The columns are ``item.cols``. For a packed FP8 shard: each block's codes and scale, uint8 [rows, blocks, 132].
        """
        data = self._rows(item, matrix, begin, end)
        scales = item.source.scales
        if scales is None:
            return data
        left, right = item.cols
        block = height, width = self.catalog.block
        first, last = begin // height, -(-end // height)
        blocks = item._replace(source=scales, cols=(left // width, -(-right // width)))
        scale = self._rows(blocks, matrix, first, last)
        if item.shard.base:
            return pack_fp8(data, scale[torch.arange(begin, end) // height - first])
        packed = FORMATS[item.source.encoding].packed
        beside = None
        if third := scales.scales:
            blocks = blocks._replace(source=third)
            if third.shape == (1, 1):
                beside = self._rows(blocks._replace(cols=(0, 1)), matrix, 0, 1)
            elif third.dtype == "I32":  # packed along rows
                words = self._rows(blocks, matrix, first // packed, -(-last // packed))
                beside = unpack_integers(words.T, packed).T[first % packed :]
            else:
                beside = self._rows(blocks, matrix, first, last)
        start = left % packed
        numbers = dequantize(
            item.source.encoding, data, scale, (begin, left - start), block, beside
        )
        return numbers[:, start : start + right - left]

    def _rows(self, item: ReadItem, matrix: int, begin: int, end: int) -> Tensor:
        """Return rows [``begin``, ``end``) of matrix ``matrix`` of ``item.source``, undecoded: [rows, columns]."""
        first, last = item.fetched
        left, right = item.wanted
        buffer = torch.empty(end - begin, last - first, dtype=torch.uint8)
        self._read(item, matrix, begin, end, buffer.view(-1))
        return buffer[:, left - first : right - first].view(DTYPES[item.source.dtype])

    def _read(self, item: ReadItem, matrix: int, begin: int, end: int, into: Tensor) -> None:
        """Read the bytes ``item.fetched`` of stored rows ``begin`` to ``end`` into flat ``into`` (uint8), row by row.

        ``matrix`` is the rows' matrix, an index in the stored stack. Whole rows need one system call.
        Raises ``CheckpointError`` if the file is unreadable or too short.
        """
        source = item.source
        num_rows, row_bytes = source.row_layout
        first, last = item.fetched
        width = last - first
        start = source.start + (matrix * num_rows + begin) * row_bytes + first
        target = into.numpy().data
        step = len(target) if width == row_bytes else width

        def read(part: memoryview, offset: int) -> int:
            if source.file not in self._open:
                self._open[source.file] = open_inside(self.catalog.folder, source.file)
            try:
                return os.preadv(self._open[source.file], [part], offset)
            except OSError:  # a stale handle stays stale: the next try opens the file again
                os.close(self._open.pop(source.file))
                raise

        try:
            done = 0
            while done < len(target):
                row, skip = divmod(done, width)
                offset = start + row * row_bytes + skip
                part = target[done : done + step - done % step]
                count = retried(partial(read, part, offset))
                if count == 0:
                    raise OSError(f"it ends at byte {offset:,}")
                self.bytes_read += count
                done += count
        except OSError as error:
            raise CheckpointError(
                f"{self.catalog.folder / source.file}: {item.key} cannot be read ({error.strerror or error}). "
                "Copy the file again"
            ) from error


@contextmanager
def show_progress(name: str, num_bytes: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yield a callback that takes a number of bytes read.

    Args:
        name: name of the checkpoint.
        num_bytes: bytes that will be read in total.
        shown: False on ranks that show nothing.
    """
    if not (shown and sys.stderr.isatty()):  # rich is imported only if it is used
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"reading {name}", total=num_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
