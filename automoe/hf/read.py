"""Loading of HuggingFace safetensors into the shards of a model on any mesh.

Rank 0 parses the headers once and checks the whole checkpoint against the model. Every rank then
reads the byte ranges of its own shards, in file order, straight into them. If several ranks of a
machine need the same byte, the first one reads it from the disk and the others get it from the
page cache. No rank holds the whole of a tensor that is sharded.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from automoe.config.convert import written
from automoe.errors import CheckpointError, listed
from automoe.hf.catalog import Catalog, open_catalog
from automoe.hf.files import DTYPES
from automoe.hf.headers import StoredTensor, without_collection
from automoe.hf.keys import Piece, hf_pieces
from automoe.hf.quantized import MXFP4_BLOCK, dequantize_fp8, dequantize_mxfp4
from automoe.hf.shards import LocalShard, PackedShard, Parts, as_parts, config_of, local_shards
from automoe.hf.untrusted import open_inside
from automoe.hf.upcycle import Upcycling
from automoe.model.decoder import Decoder
from automoe.model.init import reset_buffers
from automoe.parallel.agreement import Ranks
from automoe.quantize.packed import pack_fp8, pack_nf4, unpack

# Bytes read at once if numbers are converted: this is the only scratch memory.
CHUNK_BYTES = 2 << 20
# Bytes read at once straight into a parameter: progress is shown after each read.
DIRECT_BYTES = 64 << 20
# If a row has fewer unwanted bytes than this, they are read along with the wanted columns: one call
# per row would take as long as copying about this many bytes.
GAP_BYTES = 8 << 10
MAX_OPEN = 4  # files


@dataclass(frozen=True)
class Loaded:
    """Result of ``load_hf``, alike on all ranks.

    Attributes:
        path: the checkpoint directory.
        bytes_read: bytes read from files, summed over ranks.
        seconds: time of the slowest rank.
        upcycling: rule by which a dense checkpoint became a mixture; None otherwise.
        not_finite: count of NaN and infinite values by tensor; tensors without any are left out.
        notes: as in ``Catalog``.
    """

    path: Path
    bytes_read: int
    seconds: float
    upcycling: Upcycling | None = None
    not_finite: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9) / 1e9
        text = (
            ""
            if self.upcycling is None
            else f"upcycled with granularity {self.upcycling.granularity} from "
        )
        text += f"{self.path}: read {self.bytes_read / 1e9:,.3g} GB in {self.seconds:,.1f} s ({rate:,.2g} GB/s)"
        if self.not_finite:
            where = listed(f"{key} ({count:,})" for key, count in self.not_finite.items())
            text += f"; WARNING: {sum(self.not_finite.values()):,} of its numbers are NaN or infinite: {where}"
        return "; ".join((text, *self.notes))


def load_hf(
    parts: Parts | Decoder,
    path: str | Path,
    catalog: Catalog | None = None,
    *,
    upcycling: Upcycling | None = None,
    progress: bool = False,
) -> Loaded:
    """Fill a model, or this rank's pipeline stages of it, from a checkpoint directory.

    Collective, unless ``catalog`` (of the same directory) is given.

    Parameters may be DTensors on either mesh. They need storage (``to_empty``) but no values;
    buffers that a checkpoint does not hold are initialised. Numbers are converted to each
    parameter's dtype. Block-FP8 and MXFP4, as declared in config.json's ``quantization_config``,
    are dequantized while they are read.

    Args:
        upcycling: rule for experts and routers if ``path`` is dense and the model is a mixture.
        progress: show a progress bar on rank 0 if stderr is a terminal.

    Raises:
        CheckpointError: on every rank alike: a file is missing, truncated or a Git LFS pointer;
            keys are missing or unexpected; a shape or the number of experts differs; FP8 codes have
            no scales.
    """
    started = time.perf_counter()
    parts = as_parts(parts)
    for part in parts.values():
        reset_buffers(part)
    ranks = Ranks(alone=catalog is not None)
    with (
        torch.no_grad(),
        Reader(catalog or open_catalog(path, config_of(parts), upcycling)) as reader,
    ):
        shards = list(local_shards(parts))
        rounded = [
            shard for shard in shards if isinstance(shard, PackedShard) and shard.base == "nf4"
        ]
        direct = [
            shard for shard in shards if not isinstance(shard, PackedShard) or shard.base == "fp8"
        ]
        shown = progress and ranks.rank == 0

        def fill() -> tuple[int, float, dict[tuple[Any, ...], int]]:
            ranges = reader.plan(direct)
            later = (
                reader.plan([one]) for shard in rounded for _, one in shard.matrices(widened=False)
            )
            total = sum(
                one.num_bytes(one.place) for part in chain((ranges,), later) for one in part
            )
            with show_progress(Path(path).name, total, shown) as reader.advance:
                reader.fill(ranges)
                odd = _not_finite(ranges)
                for shard in rounded:
                    odd |= _fill_rounded(shard, reader)
            for shard in shards:
                reader.catalog.finish(shard)
            return reader.bytes_read, time.perf_counter() - started, odd

        read, seconds, odd = zip(*ranks.all(fill), strict=True)
    not_finite: dict[str, int] = {}
    # Several ranks may hold the same slice: it is counted once.
    for (key, *_), count in {place: count for one in odd for place, count in one.items()}.items():
        not_finite[key] = not_finite.get(key, 0) + count
    source = written(path) if isinstance(path, str) else path
    notes = reader.catalog.notes
    return Loaded(Path(source), sum(read), max(seconds), upcycling, not_finite, notes)


def _fill_rounded(shard: PackedShard, reader: Reader) -> dict[tuple[Any, ...], int]:
    """Read a packed shard matrix by matrix in float32, quantize it; return as ``_not_finite``."""
    odd: dict[tuple[Any, ...], int] = {}
    for index, one in shard.matrices(widened=False):
        ranges = reader.plan([one])
        reader.fill(ranges)
        odd |= _not_finite(ranges)
        shard.local[index].copy_(pack_nf4(one.local.to(shard.local.device)))
    return odd


def _not_finite(ranges: list[ReadItem]) -> dict[tuple[Any, ...], int]:
    """Count NaN and infinite numbers by place in the checkpoint: (key, matrices, rows, columns)."""
    counts = {
        (one.key, one.matrices, one.rows, one.cols): num_not_finite(one.widened()) for one in ranges
    }
    return {place: count for place, count in counts.items() if count}


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no number is NaN or infinite, in one pass and without a temporary tensor."""
    return tensor.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def num_not_finite(tensor: torch.Tensor) -> int:
    """Return the number of NaN and infinite values."""
    return 0 if is_finite(tensor) else int((~torch.isfinite(tensor)).sum())


class ReadItem(NamedTuple):
    """Slice of a stored tensor, together with the slice of a shard that it fills.

    A stored tensor is treated as a stack of matrices, and a vector as a matrix with one column.

    Attributes:
        shard: destination.
        key: name of the stored tensor.
        source: the stored tensor.
        matrices, rows, cols: half-open ranges in the stored tensor.
        place: view of the shard, [matrices, rows, columns] in stored order; rows or columns may
            span two dims.
        row_unit: stored rows for each index of ``place``'s dim 1.
        stored: rows of bytes of the stored numbers or codes.
    """

    shard: LocalShard
    key: str
    source: StoredTensor
    matrices: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]
    place: torch.Tensor
    row_unit: int
    stored: _Rows

    def widened(self) -> torch.Tensor:
        """Return the numbers of ``place``, dequantized if the shard is packed."""
        return unpack(self.place, self.cols[1] - self.cols[0], torch.float32)

    def num_bytes(self, place: torch.Tensor) -> int:
        """Return the stored size in bytes of a slice of ``place``, without scales."""
        return place.numel() * self.source.num_bytes // math.prod(self.source.full_shape)

    def chunks(self, num_rows: int) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Yield (matrix, first row, end row, slice of ``place``), about ``num_rows`` rows each."""
        step = max(1, num_rows // self.row_unit) * self.row_unit
        for matrix in range(*self.matrices):
            for begin in range(*self.rows, step):
                end = min(begin + step, self.rows[1])
                first, last = ((row - self.rows[0]) // self.row_unit for row in (begin, end))
                yield matrix, begin, end, self.place[matrix - self.matrices[0], first:last]


def _read_item(shard: LocalShard, piece: Piece, source: StoredTensor) -> ReadItem | None:
    """Return the part of ``shard`` that ``piece`` holds; None if they do not overlap."""
    found = piece.overlap(shard.start, shard.extent)
    if found is None:
        return None
    if isinstance(shard, PackedShard) and source.encoding != "fp8":
        raise CheckpointError(
            f"lora.base={shard.base} keeps matrices as the checkpoint stores them, in block-FP8, and {piece.key} is "
            f"{source.dtype}. Set lora.base=nf4 or weights"
        )
    spans = [(one.start, one.stop) for one in found[0]]
    place = piece.in_stored_order(shard.local[found[1]])
    if len(spans) == 1:
        spans = [*spans, (0, 1)]
        place = place.unsqueeze(1)
    if len(spans) == 2:
        spans = [(0, 1), *spans]
        place = place.unsqueeze(0)
    matrices, rows, cols = spans
    row_unit = 1
    stored = _Rows.of(source, cols)
    # MXFP4 stores the last two dims transposed: [..., rows, groups, 16 bytes].
    if source.encoding == "mxfp4":
        rows, cols, place = cols, rows, place.movedim(1, -1)
        row_unit = place.shape[2] if piece.merged else 1
        stored = _Rows.of(source, (cols[0] // MXFP4_BLOCK, -(-cols[1] // MXFP4_BLOCK)), dims=2)
    return ReadItem(shard, piece.key, source, matrices, rows, cols, place, row_unit, stored)


class Reader:
    """Reader of slices of a catalog's tensors, with at most ``MAX_OPEN`` files open at once.

    Attributes:
        bytes_read: bytes read from files so far.
        advance: callback that receives the stored bytes of each chunk once the chunk is copied.
    """

    def __init__(
        self, catalog: Catalog, advance: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        self.catalog = catalog
        self.advance = advance
        self.bytes_read = 0
        self._open: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    @without_collection()
    def plan(self, shards: Iterable[LocalShard]) -> list[ReadItem]:
        """Plan the reads that fill ``shards``, in file order."""
        ranges = []
        for shard in shards:
            if shard.local.numel() == 0:  # a dim shorter than its mesh axis leaves some ranks empty
                continue
            experts = range(shard.start[0], shard.start[0] + shard.local.shape[0])
            for piece in hf_pieces(shard.name, shard.shape, self.catalog.keys, experts):
                if (one := _read_item(shard, piece, self.catalog.sources[piece.key])) is not None:
                    ranges.append(one)
        return sorted(ranges, key=lambda one: (one.source.file, one.source.start))

    def fill(self, ranges: Iterable[ReadItem]) -> None:
        """Copy every item into its place.

        Raises:
            CheckpointError: a file was removed, shortened or made unreadable since its header was
                read.
        """
        for one in ranges:
            stored = one.stored
            place = one.place
            if (  # stored bytes equal the parameter's: no buffer is needed
                one.source.encoding == "plain"
                and place.dtype == DTYPES[stored.tensor.dtype]
                and place.device.type == "cpu"
                and place[0].is_contiguous()
                and stored.read == stored.wanted
            ):
                for matrix, begin, end, part in one.chunks(DIRECT_BYTES // stored.width):
                    self._read(one, stored, matrix, (begin, end), part.view(-1).view(torch.uint8))
                    self.advance(one.num_bytes(part))
            else:
                self.visit([one], lambda _, numbers, part: part.copy_(numbers))

    def visit(
        self,
        ranges: Iterable[ReadItem],
        use: Callable[[ReadItem, torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Read a few rows at a time, and call ``use(item, numbers, place)`` with each.

        ``place`` is the part of the item's shard that the rows belong to, and ``numbers`` are the
        rows in the same shape: on the CPU, in the checkpoint's dtype, or float32 if the checkpoint
        is quantized.

        Raises:
            CheckpointError: a file was removed, shortened or made unreadable since its header was
                read.
        """
        for one in ranges:
            for matrix, begin, end, part in one.chunks(CHUNK_BYTES // one.stored.width):
                use(one, self._numbers(one, matrix, begin, end).view(part.shape), part)
                self.advance(one.num_bytes(part))

    def _numbers(self, one: ReadItem, matrix: int, begin: int, end: int) -> torch.Tensor:
        """Return rows of a matrix [rows, columns], dequantized; [rows, blocks, bytes] if packed."""
        source, (left, right) = one.source, one.cols
        data = self._rows(one, one.stored, matrix, (begin, end)).view(DTYPES[source.dtype])
        if source.scales is None:
            return data
        if source.encoding == "fp8":
            height, width = self.catalog.block
            blocks = (begin // height, -(-end // height))
            scales = self._rows(
                one, _Rows.of(source.scales, (left // width, -(-right // width))), matrix, blocks
            )
            if isinstance(one.shard, PackedShard):
                by_row = torch.arange(begin, end) // height - blocks[0]
                return pack_fp8(data, scales.view(DTYPES[source.scales.dtype])[by_row])
            return dequantize_fp8(
                data, scales.view(DTYPES[source.scales.dtype]), (begin, left), (height, width)
            )
        groups = (left // MXFP4_BLOCK, -(-right // MXFP4_BLOCK))
        scales = self._rows(one, _Rows.of(source.scales, groups), matrix, (begin, end))
        first = groups[0] * MXFP4_BLOCK
        return dequantize_mxfp4(data, scales)[:, left - first : right - first]

    def _rows(
        self, one: ReadItem, stored: _Rows, matrix: int, rows: tuple[int, int]
    ) -> torch.Tensor:
        """Return the selected bytes of some rows of ``stored``, [rows, bytes]."""
        buffer = torch.empty(rows[1] - rows[0], stored.width, dtype=torch.uint8)
        self._read(one, stored, matrix, rows, buffer.view(-1))
        return buffer[:, stored.wanted[0] - stored.read[0] : stored.wanted[1] - stored.read[0]]

    def _read(
        self, one: ReadItem, stored: _Rows, matrix: int, rows: tuple[int, int], into: torch.Tensor
    ) -> None:
        file = stored.tensor.file
        target = into.numpy().data
        width = stored.width
        start = (
            stored.tensor.start
            + (matrix * stored.num_rows + rows[0]) * stored.row_bytes
            + stored.read[0]
        )
        try:
            if file not in self._open:
                if len(self._open) == MAX_OPEN:
                    os.close(self._open.pop(next(iter(self._open))))
                self._open[file] = open_inside(self.catalog.folder, file)
            if width == stored.row_bytes:
                self._fill(self._open[file], target, start)
            else:
                for row in range(rows[1] - rows[0]):
                    into_row = target[row * width : (row + 1) * width]
                    self._fill(self._open[file], into_row, start + row * stored.row_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{self.catalog.folder / file}: {one.key} cannot be read ({error.strerror or error}). "
                "Copy the file again"
            ) from error

    def _fill(self, handle: int, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(handle, [into[done:]], offset + done)
            if count == 0:
                raise OSError(f"it ends at byte {offset + done:,}")
            self.bytes_read += count
            done += count


class _Rows(NamedTuple):
    """A stored stack of matrices as rows of bytes, of which a range is wanted and a range read."""

    tensor: StoredTensor
    num_rows: int  # of one matrix
    row_bytes: int
    wanted: tuple[int, int]
    read: tuple[int, int]

    @classmethod
    def of(cls, tensor: StoredTensor, cols: tuple[int, int], dims: int = 1) -> _Rows:
        """Select ``cols``, indices of the first of the last ``dims`` dims, which make up a row."""
        shape = tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)
        step = DTYPES[tensor.dtype].itemsize * math.prod(shape[len(shape) - dims + 1 :])
        row_bytes = shape[-dims] * step
        wanted = (cols[0] * step, cols[1] * step)
        read = (0, row_bytes) if row_bytes - (wanted[1] - wanted[0]) < GAP_BYTES else wanted
        return cls(tensor, shape[-dims - 1], row_bytes, wanted, read)

    @property
    def width(self) -> int:
        """Number of bytes read of each row."""
        return self.read[1] - self.read[0]


@contextmanager
def show_progress(name: str, num_bytes: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar with GB/s on a terminal; yield a callback that takes bytes read.

    Args:
        name: name of the checkpoint.
        num_bytes: bytes that will be read in total.
        shown: False on ranks that show nothing.
    """
    if not (shown and sys.stderr.isatty()):  # rich is imported only if it is used
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("reading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=num_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
