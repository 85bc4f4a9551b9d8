"""Documents packed into rows: one stream per epoch, cut every seq_len tokens, row by row on demand;
or whole samples, as many to a row as fit.

Letters: N documents, R rows, S seq_len.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from automoe.moe.tokens import IGNORE


@dataclass(frozen=True)
class Rows:
    """R packed rows, each array [R, S] int64; the fields are those of ``StepBatch``."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_ids: np.ndarray


def seeded_order(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) that depends on ``key`` alone, [n] int64.

    Sorting raw PCG64 output keeps it equal over NumPy versions: bit streams are promised to stay,
    ``Generator.permutation`` is not.
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(n), kind="stable")


class PackedRows:
    """The endless sequence of rows that a set of documents gives; row i is computed, not stored.

    Epoch e holds rows [e * num_rows, (e + 1) * num_rows). Its documents are shuffled by (seed, e),
    concatenated, and cut every S tokens, the last row filled with padding; the rows are then
    shuffled by (seed, e) again. No rank, mesh or batch size enters, so row i is the same
    everywhere.

    Args:
        tokens: every token of the corpus, any integer dtype (a memory map).
        starts, lengths: [N] each document's place in ``tokens``; lengths are at least 1.
        document_mask: number the documents of a row in ``doc_ids`` and restart ``positions`` at
            each. Without it a row counts as one document. Labels never cross a document's end
            either way.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        *,
        seq_len: int,
        seed: int,
        pad_id: int,
        document_mask: bool = True,
    ) -> None:
        assert len(starts) == len(lengths) > 0 and lengths.min() > 0
        self.tokens = tokens
        self.starts = starts
        self.lengths = lengths
        self.seq_len = seq_len
        self.seed = seed
        self.pad_id = pad_id
        self.document_mask = document_mask
        self.num_tokens = int(lengths.sum())
        self.num_rows = -(-self.num_tokens // seq_len)
        # A batch across an epoch's end needs two epochs at a time.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def take(self, indices: np.ndarray) -> Rows:
        """Rows of the endless sequence by index, [R] int64; index -1 is a row of padding only."""
        shape = (len(indices), self.seq_len)
        rows = Rows(
            tokens=np.full(shape, self.pad_id, dtype=np.int64),
            labels=np.full(shape, IGNORE, dtype=np.int64),
            positions=np.zeros(shape, dtype=np.int64),
            doc_ids=np.full(shape, -1, dtype=np.int64),
        )
        epochs = indices // self.num_rows
        for epoch in np.unique(epochs[indices >= 0]):
            chosen = np.flatnonzero((epochs == epoch) & (indices >= 0))
            self._fill(rows, chosen, int(epoch), indices[chosen] % self.num_rows)
        return rows

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Documents with tokens in the rows ``indices`` of the endless sequence, as sorted indices
        into ``starts``."""
        found: list[np.ndarray] = []
        for index in indices[indices >= 0]:
            doc_order, doc_ends, row_order = self._epoch(int(index) // self.num_rows)
            start = int(row_order[index % self.num_rows]) * self.seq_len
            last = min(start + self.seq_len, self.num_tokens) - 1
            first_doc, last_doc = np.searchsorted(doc_ends, [start, last], side="right")
            found.append(doc_order[first_doc : last_doc + 1])
        return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        doc_order = seeded_order(len(self.lengths), self.seed, epoch, 0)
        row_order = seeded_order(self.num_rows, self.seed, epoch, 1)
        return doc_order, np.cumsum(self.lengths[doc_order]), row_order

    def _fill(self, rows: Rows, chosen: np.ndarray, epoch: int, within: np.ndarray) -> None:
        """Write the epoch's rows ``within`` to ``rows[chosen]``; all places below are in its
        stream."""
        S = self.seq_len
        doc_order, doc_ends, row_order = self._epoch(epoch)
        row_start = row_order[within, None] * S  # [R, 1]
        place = row_start + np.arange(S + 1)  # [R, S + 1]: one more, for the last label
        real = place < self.num_tokens
        doc = np.searchsorted(doc_ends, np.minimum(place, self.num_tokens - 1), side="right")
        original = doc_order[doc]
        doc_start = doc_ends[doc] - self.lengths[original]
        source = self.starts[original] + np.minimum(place, self.num_tokens - 1) - doc_start
        tokens = np.where(real, self.tokens[source].astype(np.int64), self.pad_id)

        same = real[:, 1:] & (doc[:, 1:] == doc[:, :-1])
        rows.tokens[chosen] = tokens[:, :-1]
        rows.labels[chosen] = np.where(same, tokens[:, 1:], IGNORE)
        if self.document_mask:
            # A document cut by a row's end goes on at position 0: positions stay below S.
            positions = place - np.maximum(doc_start, row_start)
            doc_ids = doc - doc[:, :1]
        else:
            positions = place - row_start
            doc_ids = np.zeros_like(place)
        rows.positions[chosen] = np.where(real, positions, 0)[:, :-1]
        rows.doc_ids[chosen] = np.where(real, doc_ids, -1)[:, :-1]


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Row of each sample, [N] int64: in the given order, into the row with the least room that is
    enough for it.

    Given longest first this is best-fit decreasing, which needs at most 11/9 of the fewest rows
    possible, plus one (Johnson 1973), and in practice wastes about a percent.

    Args:
        lengths: [N], each at most ``size``.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(size + 1)]
    # bit r of rooms: there is a row with room r
    rooms = 0
    num_rows = 0
    for place, length in enumerate(lengths.tolist()):
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room = size
            row = num_rows
            num_rows += 1
        rows[place] = row
        if left := room - length:
            by_room[left].append(row)
            rooms |= 1 << left
    return rows


class SampleRows(PackedRows):
    """The endless sequence of rows that samples of conversations give: each whole, and alone to
    itself, in one row.

    Labels are the next tokens that ``trained`` marks, within a sample. Every epoch has the same
    number of rows: which samples share one depends on (seed, epoch) among samples of equal length,
    and on the lengths.

    Args:
        tokens, starts, lengths, seq_len, seed, pad_id, document_mask: as for ``PackedRows``; no
        length above seq_len. trained: [sum of lengths] whether a token is one that a model has to
        generate. firsts: [N] tokens of the first of the two sequences that each sample consists of:
        both are in its row, as
            documents of their own. None: a sample is one sequence.
        pack: several samples to a row (``best_fit``); else one.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        *,
        trained: np.ndarray,
        firsts: np.ndarray | None = None,
        seq_len: int,
        seed: int,
        pad_id: int,
        document_mask: bool = True,
        pack: bool = True,
    ) -> None:
        super().__init__(
            tokens,
            starts,
            lengths,
            seq_len=seq_len,
            seed=seed,
            pad_id=pad_id,
            document_mask=document_mask,
        )
        assert lengths.max() <= seq_len and (document_mask or not pack)
        self.trained = trained
        self.firsts = firsts
        self.pack = pack
        self.num_rows = len(self._epoch(0)[1])

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Samples in the rows ``indices`` of the endless sequence, as sorted indices into
        ``starts``."""
        found = [self.samples(int(index)) for index in indices[indices >= 0]]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)

    def samples(self, index: int) -> np.ndarray:
        """Samples of one row, in their order, as indices into ``starts``."""
        epoch, within = divmod(index, self.num_rows)
        order, row_starts, row_order = self._epoch(epoch)
        row = row_order[within]
        return order[row_starts[row] : row_starts[row + 1] if row + 1 < len(row_starts) else None]

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shuffled = seeded_order(len(self.lengths), self.seed, epoch, 0)
        order = shuffled[np.argsort(-self.lengths[shuffled], kind="stable")]
        rows = best_fit(self.lengths[order], self.seq_len) if self.pack else np.arange(len(order))
        by_row = np.argsort(rows, kind="stable")
        row_starts = np.searchsorted(rows[by_row], np.arange(rows.max() + 1))
        return order[by_row], row_starts, seeded_order(len(row_starts), self.seed, epoch, 1)

    def _fill(self, rows: Rows, chosen: np.ndarray, epoch: int, within: np.ndarray) -> None:
        for row, index in zip(chosen, epoch * self.num_rows + within, strict=True):
            place = 0
            for number, (start, length) in enumerate(self._sequences(self.samples(int(index)))):
                tokens = self.tokens[start : start + length].astype(np.int64)
                here = slice(place, place + length)
                rows.tokens[row, here] = tokens
                trained = self.trained[start + 1 : start + length]
                rows.labels[row, place : place + length - 1] = np.where(trained, tokens[1:], IGNORE)
                rows.positions[row, here] = np.arange(length)
                rows.doc_ids[row, here] = number
                place += length

    def _sequences(self, samples: np.ndarray) -> Iterator[tuple[int, int]]:
        """Start and length of every sequence of ``samples``, one or two each."""
        for sample in samples:
            start = int(self.starts[sample])
            length = int(self.lengths[sample])
            first = length if self.firsts is None else int(self.firsts[sample])
            yield start, first
            if first < length:
                yield start + first, length - first
