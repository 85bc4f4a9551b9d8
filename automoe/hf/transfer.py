"""Bytes of a checkpoint's files into the places that need them: read once, sent on, dequantized on the way."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from automoe.errors import CheckpointError
from automoe.hf.catalog import ITEM_BYTES, Catalog
from automoe.hf.files import StoredTensor
from automoe.hf.quantized import MXFP4_BLOCK, dequantize_fp8, dequantize_mxfp4
from automoe.hf.strips import Read, Unit

# What is in memory at once besides the model: one chunk of stored bytes with the numbers it becomes, and chunks
# that are on their way to other ranks.
CHUNK_BYTES = 2 << 20
SENDING_BYTES = 24 << 20
DIRECT_BYTES = 64 << 20  # at once straight into a parameter, which is no scratch; progress is told in between
MAX_OPEN = 4  # files
QUANTIZED_ROWS = 128  # chunks of quantized matrices end at a multiple of it: no scale is read twice

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}

Use = Callable[[Read, torch.Tensor, torch.Tensor], None]


@dataclass
class Counts:
    """Bytes of one load on one rank, each counted where it happens.

    Attributes:
        read: from files, by this rank.
        owned: stored bytes of what this rank's shards hold, scales included.
        received: from other ranks of the machine.
        largest_scratch: most bytes at once in chunks and in messages on their way.
    """

    read: int = 0
    owned: int = 0
    received: int = 0
    largest_scratch: int = 0

    def hold(self, num_bytes: int) -> None:
        self.largest_scratch = max(self.largest_scratch, num_bytes)


@dataclass(frozen=True)
class Span:
    """Rows of one stored matrix and a range of bytes in each of them."""

    stored: StoredTensor
    row_bytes: int
    rows: tuple[int, int]  # counted over all matrices of the tensor
    part: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.part[1] - self.part[0])


class Layout:
    """Where the numbers of some columns of one stored matrix lie in the files."""

    def __init__(self, catalog: Catalog, number: int, matrix: int, cols: tuple[int, int]) -> None:
        source = catalog.sources[number]
        self.source, self.matrix, self.cols, self.block = source, matrix, cols, catalog.block
        data, scales = source.data, source.scales
        shape = data.shape if len(data.shape) > 1 else (*data.shape, 1)
        if source.encoding == "mxfp4":
            self.groups = (cols[0] // MXFP4_BLOCK, -(-cols[1] // MXFP4_BLOCK))
            self.num_rows, self.row_bytes = shape[-3], shape[-2] * shape[-1]
            self.part = (self.groups[0] * MXFP4_BLOCK // 2, self.groups[1] * MXFP4_BLOCK // 2)
        else:
            item = ITEM_BYTES[data.dtype]
            self.num_rows, self.row_bytes = shape[-2], shape[-1] * item
            self.part = (cols[0] * item, cols[1] * item)
        if scales is not None:
            item = ITEM_BYTES[scales.dtype]
            self.scale_rows, self.scale_row_bytes = scales.shape[-2], scales.shape[-1] * item
            first, last = self.groups if source.encoding == "mxfp4" else self._blocks(1, cols)
            self.scale_part = (first * item, last * item)

    def _blocks(self, dim: int, span: tuple[int, int]) -> tuple[int, int]:
        return span[0] // self.block[dim], -(-span[1] // self.block[dim])

    def spans(self, begin: int, end: int) -> list[Span]:
        """Codes, or numbers, of these rows, and their scales where there are some."""
        first = self.matrix * self.num_rows
        spans = [Span(self.source.data, self.row_bytes, (first + begin, first + end), self.part)]
        if self.source.scales is not None:
            rows = (begin, end) if self.source.encoding == "mxfp4" else self._blocks(0, (begin, end))
            first = self.matrix * self.scale_rows
            rows = (first + rows[0], first + rows[1])
            spans.append(Span(self.source.scales, self.scale_row_bytes, rows, self.scale_part))
        return spans

    def num_bytes(self, begin: int, end: int) -> int:
        return sum(span.num_bytes for span in self.spans(begin, end))

    def chunks(self, begin: int, end: int, chunk_bytes: int) -> list[tuple[int, int]]:
        """``begin`` to ``end`` in pieces of about ``chunk_bytes``."""
        step = max(1, chunk_bytes // (self.part[1] - self.part[0]))
        align = 1
        if self.source.scales is not None:
            align = QUANTIZED_ROWS if self.source.encoding == "mxfp4" else self.block[0]
            step = max(align, step // align * align)
        cuts = range(begin // align * align + step, end, step)
        return list(zip([begin, *cuts], [*cuts, end], strict=True))

    def numbers(self, buffer: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[rows, columns] of what ``spans`` were read into one after the other, scales at a multiple of 16."""
        codes, *scales = self.spans(begin, end)
        data = buffer[: codes.num_bytes].view(DTYPES[self.source.data.dtype]).view(end - begin, -1)
        if self.source.scales is None:
            return data
        dtype = DTYPES[self.source.scales.dtype]
        at = _aligned(codes.num_bytes)
        factors = buffer[at : at + scales[0].num_bytes].view(dtype)
        factors = factors.view(scales[0].rows[1] - scales[0].rows[0], -1)
        if self.source.encoding == "fp8":
            return dequantize_fp8(data, factors, (begin, self.cols[0]), self.block)
        first = self.groups[0] * MXFP4_BLOCK
        return dequantize_mxfp4(data, factors)[:, self.cols[0] - first : self.cols[1] - first]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


class Files:
    """Open files of a checkpoint, the last few of them, and what was read from them.

    Raises:
        CheckpointError: a file that was there when its header was read is gone or shorter.
    """

    def __init__(self, catalog: Catalog, counts: Counts) -> None:
        self.folder, self.counts = catalog.folder, counts
        self._open: dict[str, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def read(self, span: Span, into: memoryview, name: str) -> None:
        """``span`` of the tensor called ``name``, row after row."""
        file, width = span.stored.file, span.part[1] - span.part[0]
        try:
            handle = self._handle(file)
            start = span.stored.start + span.part[0]
            if width == span.row_bytes:
                self._fill(handle, into, start + span.rows[0] * width)
            else:
                for row in range(*span.rows):
                    at = (row - span.rows[0]) * width
                    self._fill(handle, into[at : at + width], start + row * span.row_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / file}: {name} cannot be read ({error.strerror or error}). Copy the file again"
            ) from error

    def _handle(self, file: str) -> int:
        if file not in self._open:
            if len(self._open) == MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = os.open(self.folder / file, os.O_RDONLY)
        return self._open[file]

    def _fill(self, handle: int, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(handle, [into[done:]], offset + done)
            if count == 0:
                raise OSError(f"it ends at byte {offset + done:,}")
            self.counts.read += count
            done += count


@dataclass
class Sender:
    """Messages to other ranks that have not arrived yet."""

    group: dist.ProcessGroup | None
    waiting: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)
    num_bytes: int = 0

    def send(self, buffer: torch.Tensor, rank: int) -> None:
        work = dist.isend(buffer, rank, group=self.group)
        self.waiting.append((work, buffer))
        self.num_bytes += buffer.numel()
        self.drain(SENDING_BYTES)

    def drain(self, limit: int) -> None:
        while self.num_bytes > limit:
            work, buffer = self.waiting.popleft()
            work.wait()
            self.num_bytes -= buffer.numel()


class Transfer:
    """Reads, sends and receives units in order, and hands every part to ``use(read, numbers, place)``.

    All ranks of a machine walk through the same order, so that whoever waits for a message waits for a rank that
    is not ahead of it. One that cannot read any more still sends what others expect, marked as void, and raises
    at the end.

    Args:
        rank: this one, in the world.
        group: ranks of this machine; None: the default one, or none at all.
        advance: told of every number of bytes that arrived here.
        direct: ``use`` copies: bytes that are already a parameter's may go straight to it.
    """

    def __init__(
        self,
        catalog: Catalog,
        rank: int,
        group: dist.ProcessGroup | None,
        use: Use,
        advance: Callable[[int], None] = lambda num_bytes: None,
        direct: bool = False,
    ) -> None:
        self.catalog, self.rank, self.use, self.advance, self.direct = catalog, rank, use, advance, direct
        self.counts = Counts()
        self.files = Files(catalog, self.counts)
        self.sender = Sender(group)
        self.failure: CheckpointError | None = None

    def run(self, units: list[Unit]) -> Counts:
        """All of ``units``.

        Raises:
            CheckpointError: the first thing that went wrong on this rank.
        """
        with self.files:
            for unit in units:
                layout = Layout(self.catalog, unit.number, unit.matrix, unit.cols)
                for strip in unit.strips:
                    own = layout
                    if strip.cols != unit.cols:
                        own = Layout(self.catalog, unit.number, unit.matrix, strip.cols)
                    self.counts.owned += own.num_bytes(*unit.rows)
                if unit.users != (self.rank,):
                    self._share(unit, layout)
                elif self.failure is None:
                    try:
                        self._read_alone(unit, layout)
                    except CheckpointError as error:
                        self.failure = error
            self.sender.drain(0)
        if self.failure is not None:
            raise self.failure
        return self.counts

    def stored_bytes(self, units: list[Unit]) -> int:
        """All that will arrive here, for a progress bar."""
        layouts = [(Layout(self.catalog, unit.number, unit.matrix, unit.cols), unit.rows) for unit in units]
        return sum(layout.num_bytes(*rows) for layout, rows in layouts)

    def _read_alone(self, unit: Unit, layout: Layout) -> None:
        straight = self.direct and _goes_straight(unit, layout)
        for begin, end in layout.chunks(*unit.rows, DIRECT_BYTES if straight else CHUNK_BYTES):
            if straight:
                (span,) = layout.spans(begin, end)
                self.files.read(span, _bytes(unit.strips[0].target(begin, end)), self.catalog.names[unit.number])
            else:
                buffer = self._buffer(layout, begin, end)
                self._fill(buffer, unit, layout, begin, end)
                self._hand_over(buffer, unit, layout, begin, end)
            self.advance(layout.num_bytes(begin, end))

    def _share(self, unit: Unit, layout: Layout) -> None:
        for begin, end in layout.chunks(*unit.rows, CHUNK_BYTES):
            buffer = self._buffer(layout, begin, end)
            try:
                if unit.reader != self.rank:
                    dist.recv(buffer, unit.reader, group=self.sender.group)
                    self.counts.received += buffer.numel()
                else:
                    buffer[-1] = 0  # void until it is filled
                    try:
                        if self.failure is None:
                            self._fill(buffer, unit, layout, begin, end)
                            buffer[-1] = 1
                    finally:
                        for user in unit.users:
                            if user != self.rank:
                                self.sender.send(buffer, user)
                if self.failure is None and buffer[-1]:
                    self._hand_over(buffer, unit, layout, begin, end)
            except CheckpointError as error:
                self.failure = self.failure or error
            self.advance(layout.num_bytes(begin, end))

    def _buffer(self, layout: Layout, begin: int, end: int) -> torch.Tensor:
        """Room for codes, scales at a multiple of 16, and a byte that says whether they are there."""
        codes, *scales = layout.spans(begin, end)
        size = _aligned(codes.num_bytes) + sum(span.num_bytes for span in scales) + 1
        self.counts.hold(size + self.sender.num_bytes)
        return torch.empty(size, dtype=torch.uint8)

    def _fill(self, buffer: torch.Tensor, unit: Unit, layout: Layout, begin: int, end: int) -> None:
        at = 0
        for span in layout.spans(begin, end):
            self.files.read(span, _bytes(buffer[at : at + span.num_bytes]), self.catalog.names[unit.number])
            at = _aligned(span.num_bytes)

    def _hand_over(self, buffer: torch.Tensor, unit: Unit, layout: Layout, begin: int, end: int) -> None:
        numbers = layout.numbers(buffer, begin, end)
        for strip in unit.strips:
            part = numbers[:, strip.cols[0] - unit.cols[0] : strip.cols[1] - unit.cols[0]]
            self.use(strip.read, strip.shaped(part), strip.target(begin, end))


def _goes_straight(unit: Unit, layout: Layout) -> bool:
    """The stored bytes of this rank's only strip are, in this order, those of its place."""
    if len(unit.strips) != 1 or layout.source.encoding != "plain" or unit.strips[0].read.piece.order:
        return False
    place = unit.strips[0].target(*unit.rows)
    return place.device.type == "cpu" and place.is_contiguous() and place.dtype == DTYPES[layout.source.data.dtype]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
