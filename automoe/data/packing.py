"""Packing of a stream of documents, or of whole samples, into rows of ``seq_len`` tokens.

Any row is computed from its index. Letters: N documents, R rows, S seq_len.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np

from automoe.config.data_schema import IGNORE

# Order of documents (or samples), the documents' ends in the stream (or the rows' starts in the
# samples), and order of rows.
Epoch = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Rows:
    """R packed rows of S tokens; each array is [R, S] int64.

    Attributes:
        labels: the next token of each token; -100 (ignored by the loss) at a document's end, in
            padding, and where the next token is not trained.
        positions: index of each token within its document, from 0.
        doc_ids: number of each token's document within the row, from 0; -1 in padding.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_ids: np.ndarray


def seeded_order(n: int, *key: int) -> np.ndarray:
    """Return a permutation of range(n) that depends on ``key`` only, [n] int64.

    Equal under all NumPy versions: the permutation sorts raw bits of PCG64, which NumPy promises to
    keep stable, unlike ``Generator.permutation``.

    Args:
        key: integers that seed the generator, such as (seed, epoch).
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(n), kind="stable")


@dataclass(eq=False)
class PackedRows:
    """Endless sequence of rows made from a set of documents; row i is computed, not stored.

    Epoch e holds rows [e * num_rows, (e + 1) * num_rows). Its documents are shuffled by (seed, e),
    concatenated, and cut every S tokens; padding fills the last row. The rows are then shuffled by
    (seed, e) too. Row i depends on no rank, mesh or batch size.

    Args:
        tokens: every token of the corpus, any integer dtype (a memory map).
        starts, lengths: [N] index of each document's first token in ``tokens``, and its number of
            tokens, at least 1.
        seq_len, seed: row length S, and seed of the order.
        pad_id: token of padding.
        document_mask: True numbers the documents of a row in ``doc_ids`` and restarts ``positions``
            at each; False treats a row as one document. Labels never cross the end of a document.
        trained: [sum of lengths] True for a token that a model has to generate; None: every token.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    _: KW_ONLY
    seq_len: int
    seed: int
    pad_id: int
    document_mask: bool = True
    trained: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.lengths) > 0 and self.lengths.min() > 0
        self.num_tokens = int(self.lengths.sum())
        self.num_rows = -(-self.num_tokens // self.seq_len)
        # A batch across the end of an epoch needs two epochs at a time.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def take(self, indices: np.ndarray) -> Rows:
        """Return packed rows as arrays.

        Args:
            indices: [R] int64 numbers of rows, counted through all epochs; -1 gives a padding row.
        """
        padding = {"tokens": self.pad_id, "labels": IGNORE, "positions": 0, "doc_ids": -1}
        shape = (len(indices), self.seq_len)
        rows = Rows(**{name: np.full(shape, fill, np.int64) for name, fill in padding.items()})
        for row in np.flatnonzero(indices >= 0):
            self.fill(rows, row, int(indices[row]))
        return rows

    def fill(self, rows: Rows, row: int, index: int) -> None:
        """Compute one packed row and write it into arrays.

        Args:
            rows: arrays [R, S] to write into.
            row: index of the row of ``rows`` to write, which holds only padding so far.
            index: number of the packed row, counted through all epochs: epoch e begins with row
                e * num_rows.
        """
        # Pieces may have one token more than the row, which is its last label.
        starts, lengths = self._pieces(index)
        place = np.arange(lengths.sum())
        document = np.repeat(np.arange(len(lengths)), lengths)
        position = place - (np.cumsum(lengths) - lengths)[document]
        source = starts[document] + position
        tokens = self.tokens[source].astype(np.int64)
        labelled = document[1:] == document[:-1]
        if self.trained is not None:
            labelled &= self.trained[source[1:]]
        size = min(len(tokens), self.seq_len)
        rows.tokens[row, :size] = tokens[:size]
        rows.labels[row, : len(labelled)] = np.where(labelled, tokens[1:], IGNORE)
        rows.positions[row, :size] = (position if self.document_mask else place)[:size]
        rows.doc_ids[row, :size] = document[:size] * self.document_mask

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Return which documents have tokens in these rows, as sorted indices into ``starts``.

        Args:
            indices: row indices; -1 (padding) has no documents.
        """
        rows = [self.row_documents(int(index)) for index in indices[indices >= 0]]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))

    def row_documents(self, index: int) -> np.ndarray:
        """Return the documents of row ``index`` in their order, as indices into ``starts``."""
        return self._span(index, self.seq_len)[0]

    def _span(self, index: int, size: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Return the documents that a row consists of, and where they lie in the epoch.

        An epoch's documents are concatenated; positions below are indices into all their tokens.

        Args:
            index: number of the row, counted through all epochs.
            size: number of tokens to cover, from the row's first one.

        Returns:
            (indices of the documents; position after the end of each; position of the row's first
            token; position after the last of the ``size`` tokens, or the end of the epoch if it
            comes first).
        """
        epoch, within = divmod(index, self.num_rows)
        doc_order, doc_ends, row_order = self._epoch(epoch)
        start = int(row_order[within]) * self.seq_len
        end = min(start + size, self.num_tokens)
        first_doc, last_doc = np.searchsorted(doc_ends, [start, end - 1], side="right")
        here = slice(first_doc, last_doc + 1)
        return doc_order[here], doc_ends[here], start, end

    def _pieces(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return start and length, [P] each, of the P slices of the corpus's ``tokens`` that form row ``index``.

        If the last document continues in the next row, its slice has one more token: the label of
        the row's last token.
        """
        documents, ends, start, end = self._span(index, self.seq_len + 1)
        begins = ends - self.lengths[documents]
        skipped = np.maximum(start - begins, 0)
        return self.starts[documents] + skipped, np.minimum(ends, end) - begins - skipped

    def _make_epoch(self, epoch: int) -> Epoch:
        """Return how an epoch's documents are shuffled and cut into rows.

        Returns:
            [N] indices of the documents in shuffled order; [N] end of each when they are
                concatenated; [num_rows] the order of the rows.
        """
        doc_order = seeded_order(len(self.lengths), self.seed, epoch, 0)
        row_order = seeded_order(self.num_rows, self.seed, epoch, 1)
        return doc_order, np.cumsum(self.lengths[doc_order]), row_order


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Assign samples to rows by best fit; return the index of each sample's row, [N] int64.

    A sample goes to the fullest row that still has space for it, in the given order. If the longest
    samples come first, this is best-fit decreasing, which needs at most 11/9 of the fewest rows
    possible, plus one (Johnson 1973), and in practice wastes about a percent.

    Args:
        lengths: [N] tokens of each sample, at most ``size``.
        size: tokens of a row.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    by_room = [[] for _ in range(size + 1)]
    rooms = 0  # bit r is set if a row has room r
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


@dataclass(eq=False, kw_only=True)
class SampleRows(PackedRows):
    """Endless sequence of rows made from tokenised conversations, each whole within one row.

    A conversation (sample) attends only to itself. A label is the next token of the sample if
    ``trained`` marks that token. Every epoch has the same number of rows. Which samples share a row
    depends on their lengths and, among samples of equal length, on (seed, epoch).

    Args:
        tokens: every token of the corpus, any integer dtype (a memory map).
        starts, lengths: [N] index of each sample's first token in ``tokens``, and its number of
            tokens, at most ``seq_len``.
        seq_len, seed: row length S, and seed of the order.
        pad_id: token of padding.
        document_mask: False treats a row as one document; it then needs ``pack=False``.
        trained: [sum of lengths] True for a token that a model has to generate; None: every token.
        firsts: [N] length of the first sequence of each preference pair; a pair's row holds both
            sequences, as two documents. None: a sample is one sequence.
        pack: True packs several samples into a row (``best_fit``); False gives each its own row.
    """

    firsts: np.ndarray | None = None
    pack: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.lengths.max() <= self.seq_len and (self.document_mask or not self.pack)
        self.num_rows = len(self._epoch(0)[2])

    def row_documents(self, index: int) -> np.ndarray:
        epoch, within = divmod(index, self.num_rows)
        order, row_starts, row_order = self._epoch(epoch)
        row = row_order[within]
        return order[row_starts[row] : row_starts[row + 1]]

    def _make_epoch(self, epoch: int) -> Epoch:
        """Return how an epoch's samples are assigned to rows.

        Returns:
            [N] indices of the samples, row after row; [num_rows + 1] index in this list of each
                row's first sample, then N; [num_rows] the order of the rows.
        """
        shuffled = seeded_order(len(self.lengths), self.seed, epoch, 0)
        order = shuffled[np.argsort(-self.lengths[shuffled], kind="stable")]
        rows = best_fit(self.lengths[order], self.seq_len) if self.pack else np.arange(len(order))
        by_row = np.argsort(rows, kind="stable")
        num_rows = rows.max() + 1
        row_starts = np.searchsorted(rows[by_row], np.arange(num_rows + 1))
        return order[by_row], row_starts, seeded_order(num_rows, self.seed, epoch, 1)

    def _pieces(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        samples = self.row_documents(index)
        starts, lengths = self.starts[samples], self.lengths[samples]
        if self.firsts is None:
            return starts, lengths
        firsts = self.firsts[samples]
        pieces = (
            np.stack([starts, starts + firsts], axis=1),
            np.stack([firsts, lengths - firsts], 1),
        )
        return pieces[0].ravel(), pieces[1].ravel()
