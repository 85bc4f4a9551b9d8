"""The rows of each optimizer step for one data-parallel rank, with a state that resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from automoe.config.schema import Config
from automoe.data.chat_corpus import describe_chat
from automoe.data.chat_template import chat_template_of
from automoe.data.packing import PackedRows, Rows, SampleRows
from automoe.data.prepare import Split, fitting_documents, prepare_data
from automoe.errors import ConfigError, DataError
from automoe.moe.tokens import IGNORE


@dataclass
class StepBatch:
    """All micro-batches of one step for one data-parallel rank, on the CPU.

    R rows = num_micro_batches * micro_batch_size = global_batch_size / D, in micro-batch order; S = seq_len.
    Data-parallel rank d of D holds rows [d*R, (d+1)*R) of the step's global batch.
    """

    tokens: torch.Tensor  # [R, S] int64
    labels: torch.Tensor  # [R, S] int64: the next token of the same document, or IGNORE
    positions: torch.Tensor  # [R, S] int64: index within the document, for rotary embeddings
    doc_ids: torch.Tensor  # [R, S] int64: document within the row, 0, 1, ...; -1 is padding
    num_bytes: int  # UTF-8 bytes that the trained labels stand for, for bits per byte
    first_row: int  # index of row 0 in the whole training stream


class Loader:
    """Steps of training rows, and validation batches, for data-parallel rank ``dp_rank`` of ``dp_size``.

    Global batches depend on data, tokenizer, seq_len and seed alone.

    Args:
        split: what ``next_step`` walks through.
        cache_dir: where the tokenised corpus is kept; None is ``default_cache_dir()``.

    Raises:
        ConfigError: a tokenizer larger than the embedding, or rows that do not divide over the ranks.
        DataError: as ``prepare_data``.
    """

    def __init__(
        self, config: Config, dp_rank: int, dp_size: int, split: Split = "train", cache_dir: Path | None = None
    ) -> None:
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        rows = config.train.global_batch_size
        if rows % dp_size:
            raise ConfigError(
                "train.global_batch_size",
                rows,
                f"{rows} rows do not divide over {dp_size} data-parallel ranks",
                f"Set train.global_batch_size={-(-rows // dp_size) * dp_size}.",
            )
        self.config, self.split = config, split
        self.dp_rank, self.dp_size, self.rows_per_rank = dp_rank, dp_size, rows // dp_size
        self.tokenizer, self.corpus = prepare_data(config, cache_dir)
        self._packed: dict[Split, PackedRows] = {}
        self.rows_per_epoch = self._split_rows(split).num_rows
        self.consumed_rows = 0  # over all ranks, since the start of training

    def next_step(self) -> StepBatch:
        """This rank's rows of the next global batch; a new epoch starts where one ends."""
        first = self.consumed_rows + self.dp_rank * self.rows_per_rank
        batch = self._batch(self._split_rows(self.split), first, np.arange(first, first + self.rows_per_rank))
        self.consumed_rows += self.config.train.global_batch_size
        return batch

    def row(self, index: int) -> StepBatch:
        """One row of the endless sequence, [1, S]; the state stays as it is."""
        return self._batch(self._split_rows(self.split), index, np.array([index]))

    def last_batch(self) -> tuple[int, int, list[str]]:
        """First and last row of the step that ``next_step`` gave last; ``file`` or ``file:line`` of its documents."""
        packed, end = self._split_rows(self.split), self.consumed_rows
        first = end - self.config.train.global_batch_size
        found = packed.documents(np.arange(first, end))
        places = np.searchsorted(self.corpus.starts, packed.starts[found], side="right") - 1
        return first, end - 1, [self.corpus.where(int(place)) for place in places]

    def validation_batches(self, n: int) -> Iterator[StepBatch]:
        """This rank's part of the first ``n`` global batches of the validation split.

        The same rows at every call and for every training seed, none twice: there are fewer batches
        when the split ends early, the last filled up with rows of padding that train nothing.
        """
        packed = self._split_rows("validation")
        step = self.config.train.global_batch_size
        for start in range(0, min(n * step, packed.num_rows), step):
            first = start + self.dp_rank * self.rows_per_rank
            indices = np.arange(first, first + self.rows_per_rank)
            yield self._batch(packed, first, np.where(indices < packed.num_rows, indices, -1))

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, equal on every rank: the place in the data, and what the data was."""
        return {"consumed_rows": self.consumed_rows, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, under any number of ranks and any batch size.

        Raises:
            DataError: the data now is not the data then; the message lists what differs.
        """
        saved, now = state["fingerprint"], self.fingerprint()
        differing = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
        if differing:
            listed = "; ".join(f"{key} was {saved.get(key)}, is {now.get(key)}" for key in differing)
            raise DataError(
                f"The data changed since the checkpoint, so training cannot go on where it was: {listed}. "
                f"Restore the data and settings of the checkpoint, or start a new run_dir."
            )
        self.consumed_rows = int(state["consumed_rows"])

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the order and content of rows, as short comparable values."""
        data, train = self.config.data, self.config.train
        chat = {}
        if (template := chat_template_of(self.config)) is not None:
            chat = {"chat template": template.digest, "data.chat.pack": data.chat.pack, "data.on_long": data.on_long}
        return chat | {
            "data.kind": data.kind,
            "data.document_mask": data.document_mask,
            "data.val_fraction": data.val_fraction,
            "split": self.split,
            "files": len(self.corpus.paths),
            "documents": len(self.corpus.lengths),
            "text_bytes": self.corpus.text_bytes,
            "content": self.corpus.content,
            "tokenizer": self.tokenizer.digest,
            "train.seq_len": train.seq_len,
            "train.seed": train.seed,
        }

    def describe(self) -> list[str]:
        """What became of conversations, in lines for the user; none of other data."""
        corpus, rows = self.corpus, self._split_rows(self.split)
        if corpus.chat is None:
            return []
        lines = list(describe_chat(corpus.chat, len(corpus.tokens), len(corpus.lengths)))
        long = int((corpus.lengths > rows.seq_len).sum())
        if long:
            done = (
                "left out" if self.config.data.on_long == "drop" else "cut, or left out where no answer begins before"
            )
            lines.append(f"{long:,} samples are longer than train.seq_len={rows.seq_len}: {done}")
        full = rows.num_tokens / (rows.num_rows * rows.seq_len)
        return [*lines, f"{len(rows.lengths):,} samples in {rows.num_rows:,} rows an epoch, {full:.1%} full"]

    def _split_rows(self, split: Split) -> PackedRows:
        if split not in self._packed:
            corpus, data = self.corpus, self.config.data
            starts, lengths = fitting_documents(corpus, self.config, split)
            options: dict[str, Any] = {
                "seq_len": self.config.train.seq_len,
                "seed": self.config.train.seed if split == "train" else 0,
                "pad_id": self.tokenizer.pad_id,
                "document_mask": data.document_mask,
            }
            if corpus.trained is None:
                self._packed[split] = PackedRows(corpus.tokens, starts, lengths, **options)
            else:
                options |= {"trained": corpus.trained, "pack": data.chat.pack}
                self._packed[split] = SampleRows(corpus.tokens, starts, lengths, **options)
        return self._packed[split]

    def _batch(self, packed: PackedRows, first_row: int, indices: np.ndarray) -> StepBatch:
        rows = packed.take(indices)
        self._check_ids(packed, indices, rows)
        num_bytes = self.tokenizer.num_bytes(rows.labels[rows.labels != IGNORE])
        tensors = {name: torch.from_numpy(array) for name, array in vars(rows).items()}
        return StepBatch(**tensors, num_bytes=num_bytes, first_row=first_row)

    def _check_ids(self, packed: PackedRows, indices: np.ndarray, rows: Rows) -> None:
        """The embedding has a row for every id; a cache that was verified may still be damaged under a running job."""
        size = self.config.model.vocab_size
        bad = np.maximum(rows.tokens, rows.labels).max(axis=1, initial=0) >= size
        for document in packed.documents(indices[bad]) if bad.any() else ():
            start = int(packed.starts[document])
            tokens = packed.tokens[start : start + int(packed.lengths[document])]
            if (tokens >= size).any():
                at = int(np.argmax(tokens >= size))
                place = int(np.searchsorted(self.corpus.starts, start, side="right")) - 1
                raise DataError(
                    f"{self.corpus.where(place)}: token {at} of this document is id {tokens[at]}, and the embedding "
                    f"ends at {size - 1} (model.vocab_size={size}). Start again: a damaged cache is then made anew."
                )
