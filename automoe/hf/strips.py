"""Which bytes of a checkpoint each rank needs, and who reads what several ranks of one machine need.

A stored tensor is a stack of matrices; a rank needs rectangles of them. Ranks of a machine tell each other
theirs, and where rows of two meet (replicas, columns cut by etp, a tied embedding in two pipeline stages) one
of them reads and sends on. Everyone works that out alone, from the same numbers, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from automoe.hf.catalog import Catalog, Source
from automoe.hf.keys import Piece, hf_pieces
from automoe.hf.shards import LocalShard


@dataclass(eq=False)
class Read:
    """One tensor of the checkpoint and the place in a shard that a part of it belongs to.

    Attributes:
        number: of the tensor in its catalog.
        place: view of the shard.
    """

    shard: LocalShard
    piece: Piece
    number: int
    source: Source
    place: torch.Tensor

    @property
    def key(self) -> str:
        return self.piece.key

    @cached_property
    def dims(self) -> tuple[int | None, int, int]:
        """Dim of ``place`` along which matrices lie (None: there is one), that along rows, rows for each index of it."""
        num_dims = len(self.source.shape)
        order = self.piece.order or tuple(range(num_dims))
        row = 0 if num_dims == 1 else num_dims - 1 if self.source.swapped else num_dims - 2
        unit = 1
        if self.piece.merged and row == num_dims - 1:
            unit = self.piece.size[order[-1]]
        return (order[0] if num_dims == 3 else None), order[row], unit


class Strip(NamedTuple):
    """Rows and columns of one stored matrix that this rank needs: numbers, half-open, counted in the matrix.

    Attributes:
        matrix: which one of the stored tensor.
        at: index of the matrix in the place.
    """

    read: Read
    matrix: int
    at: int
    rows: tuple[int, int]
    cols: tuple[int, int]

    def target(self, begin: int, end: int) -> torch.Tensor:
        """The place of rows ``begin`` to ``end``."""
        matrix_dim, row_dim, unit = self.read.dims
        place = self.read.place
        if matrix_dim is not None:
            place = place.narrow(matrix_dim, self.at, 1)
        return place.narrow(row_dim, (begin - self.rows[0]) // unit, (end - begin) // unit)

    def shaped(self, numbers: torch.Tensor) -> torch.Tensor:
        """Stored numbers [rows, columns] of this strip with the dims of its place; a view."""
        num_dims = len(self.read.source.shape)
        if self.read.source.swapped:
            numbers = numbers.T
        numbers = numbers.squeeze(1) if num_dims == 1 else numbers.unsqueeze(0) if num_dims == 3 else numbers
        return self.read.piece.from_stored(numbers)


class Unit(NamedTuple):
    """A rectangle of one stored matrix that is read once on this machine.

    Attributes:
        reader: the rank that reads it.
        users: ranks that need something of it, the reader among them.
        strips: this rank's.
    """

    number: int
    matrix: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    reader: int
    users: tuple[int, ...]
    strips: tuple[Strip, ...]


def plan_strips(shards: Iterable[LocalShard], catalog: Catalog) -> list[Strip]:
    """All that ``shards`` need."""
    return [strip for read, slices in _reads(shards, catalog) for strip in _cut(read, slices)]


def _reads(shards: Iterable[LocalShard], catalog: Catalog) -> Iterator[tuple[Read, tuple[slice, ...]]]:
    for shard in shards:
        extent = tuple(shard.local.shape)
        if shard.local.numel() == 0:  # a dim shorter than its axis leaves ranks with nothing
            continue
        experts = range(shard.start[0], shard.start[0] + extent[0])
        for piece in hf_pieces(shard.name, tuple(shard.tensor.shape), catalog.keys, experts):
            if (found := piece.overlap(shard.start, extent)) is not None:
                number = catalog.number_of[piece.key]
                read = Read(shard, piece, number, catalog.sources[number], shard.local[found[1]])
                yield read, found[0]


def _cut(read: Read, slices: tuple[slice, ...]) -> Iterator[Strip]:
    if len(slices) == 1:  # a vector is a matrix of one column
        slices = (*slices, slice(0, 1))
    rows, cols = slices[-2:]
    if read.source.swapped:
        rows, cols = cols, rows
    stack = slices[0] if len(slices) == 3 else slice(0, 1)
    for matrix in range(stack.start, stack.stop):
        yield Strip(read, matrix, matrix - stack.start, (rows.start, rows.stop), (cols.start, cols.stop))


def rectangles(strips: list[Strip]) -> np.ndarray:
    """[N, 6] int64: tensor, matrix, rows, columns of each strip: what other ranks are told."""
    numbers = [(s.read.number, s.matrix, *s.rows, *s.cols) for s in strips]
    return np.array(numbers, dtype=np.int64).reshape(-1, 6)


def plan_units(strips: list[Strip], everyone: list[np.ndarray], ranks: list[int], rank: int) -> list[Unit]:
    """What this rank reads, sends and receives, in file order.

    Args:
        strips: this rank's.
        everyone: ``rectangles`` of each of ``ranks``, this one among them.
    """
    if not any(len(theirs) for theirs in everyone):
        return []
    table = np.concatenate(everyone)
    owner = np.repeat(np.arange(len(ranks)), [len(theirs) for theirs in everyone])
    within = np.concatenate([np.arange(len(theirs)) for theirs in everyone])
    # Every matrix gets a stretch of one long line; strips of one matrix that share rows overlap on it.
    height, stack = int(table[:, 3].max()) + 1, int(table[:, 1].max()) + 1
    begin = (table[:, 0] * stack + table[:, 1]) * height + table[:, 2]
    end = begin - table[:, 2] + table[:, 3]
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    first = np.concatenate(([True], begin[order][1:] >= reach[:-1]))
    bounds = np.append(np.flatnonzero(first), len(order))
    mine = np.add.reduceat(owner[order] == ranks.index(rank), bounds[:-1]) > 0
    units = []
    for left, right in zip(bounds[:-1][mine], bounds[1:][mine], strict=True):
        members = order[left:right]
        if right - left == 1:
            strip = strips[within[members[0]]]
            units.append(Unit(strip.read.number, strip.matrix, strip.rows, strip.cols, rank, (rank,), (strip,)))
        else:
            met = [(ranks[owner[i]], int(within[i]), *map(int, table[i])) for i in members]
            units += _meet(met, strips, rank)
    return units


def _meet(met: list[tuple[int, ...]], strips: list[Strip], rank: int) -> Iterator[Unit]:
    """Cut strips of one matrix that share rows at every border of one of them."""
    number, matrix = met[0][2:4]
    borders = sorted({row for one in met for row in one[4:6]})
    for top, bottom in zip(borders, borders[1:], strict=False):
        here = [one for one in met if one[4] <= top and bottom <= one[5]]
        users = sorted({one[0] for one in here})
        if rank not in users:
            continue
        cols = (min(one[6] for one in here), max(one[7] for one in here))
        # In turn by tensor, so that the work spreads without anyone counting.
        reader = users[(number + matrix) % len(users)]
        own = tuple(strips[one[1]] for one in here if one[0] == rank)
        yield Unit(number, matrix, (top, bottom), cols, reader, tuple(users), own)
