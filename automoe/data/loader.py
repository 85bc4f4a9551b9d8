"""Loader of each step's rows for one data-parallel rank, with a state that resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.batch import rows_of_step
from automoe.config.data_schema import sources_of
from automoe.config.schema import Config
from automoe.data.chat_corpus import describe_chat
from automoe.data.chat_template import chat_template_of
from automoe.data.mixture import Mixture
from automoe.data.outlook import describe_length, describe_unlearned
from automoe.data.packing import PackedRows, Rows
from automoe.data.prepare import Split, pack, prepare_data
from automoe.errors import ConfigError, DataError

# Endings of a fingerprint's keys that checkpoints of earlier versions do not have.
_SINCE_0_27 = ("data.sources", "conversations")


def completed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint ``saved`` with those keys of ``now`` that earlier versions did not save."""
    return {key: value for key, value in now.items() if key.endswith(_SINCE_0_27)} | dict(saved)


class Loader:
    """Data loader of one data-parallel rank: training steps and validation batches.

    Global batches depend only on data, tokenizer, seq_len and seed. Rows of several sources are
    mixed by weight; a source that ends starts again in another order.

    Attributes:
        names: names of the sources; a single source has an empty name.
        weights: shares of the sources; their sum is 1.
        corpora: tokenised corpus of each source.
        tokenizer: the tokenizer of the configuration.
        rows_per_rank: number of rows of a full global batch that this rank gets.
        rows_of_last_step: number of rows, over all ranks, of the last step that ``next_step``
            returned.
        rows_per_epoch: rows of the split in one epoch, summed over the sources.
        consumed_rows: number of rows, over all ranks, of all steps that ``next_step`` has returned.

    Args:
        config: the configuration of the run.
        dp_rank: data-parallel rank, from 0.
        dp_size: number of data-parallel ranks.
        split: the split that ``next_step`` iterates over.
        cache_dir: directory of tokenised corpora; None is ``default_cache_dir()``.
        pairs: True if the recipe compares pairs of answers, False if it trains on every answer.

    Raises:
        ConfigError: the tokenizer has more ids than the embedding has rows, or ``pairs`` is True
            for data without preference pairs, or False for data with them.
        DataError: text cannot be read, a document is too long, or a split is empty.
    """

    def __init__(
        self,
        config: Config,
        dp_rank: int,
        dp_size: int,
        split: Split = "train",
        cache_dir: Path | None = None,
        pairs: bool = False,
    ) -> None:
        rows = config.train.global_batch_size
        assert 0 <= dp_rank < dp_size and rows % dp_size == 0, (dp_rank, dp_size, rows)
        if config.data.is_preference != pairs:
            rule = f"recipe={config.recipe} learns every answer it reads, rejected ones too"
            remedy = "Set recipe=dpo"
            if pairs:
                rule = f"recipe={config.recipe} compares two answers"
                remedy = "Set data=preference data.path=FILE"
            raise ConfigError("data.kind", config.data.kind, rule, remedy)
        self.config = config
        self.split = split
        self.dp_rank = dp_rank
        self._dp_size = dp_size
        self.rows_per_rank = rows // dp_size
        self.tokenizer, self.corpora = prepare_data(config, cache_dir)
        self.names, shares, sources = zip(*sources_of(config.data), strict=True)
        self._sources = [replace(config, data=source) for source in sources]
        self._mixture = Mixture(shares, config.train.seed)
        self.weights = self._mixture.weights.tolist()
        self._rows_of = cache(self._pack)
        self.rows_per_epoch = sum(
            self._rows_of(split, source).num_rows for source in range(len(sources))
        )
        # Rows of all ranks since the start of training, without the step prepared ahead.
        self.consumed_rows = 0
        self.rows_of_last_step = rows
        self._first_pairs = np.cumsum([0, *(len(corpus.lengths) for corpus in self.corpora)])
        self._thread = ThreadPoolExecutor(1, "batches")
        # The step after the last one, and the number of rows consumed before it.
        self._ahead: tuple[int, Future[StepBatch]] | None = None

    def next_step(self) -> StepBatch:
        """Return this rank's rows of the next global batch; epochs follow without a gap.

        A thread prepares the following step while this one trains.
        """
        # After a resume or a fallback to a checkpoint, the step prepared ahead is not the next one.
        if self._ahead is not None and self._ahead[0] == self.consumed_rows:
            batch = self._ahead[1].result()
        else:
            batch = self._step(self.consumed_rows)
        self.rows_of_last_step = rows_of_step(self.config.train, self.consumed_rows)
        self.consumed_rows += self.rows_of_last_step
        self._ahead = self.consumed_rows, self._thread.submit(self._step, self.consumed_rows)
        return batch

    def _step(self, consumed_rows: int) -> StepBatch:
        rows_per_rank = rows_of_step(self.config.train, consumed_rows) // self._dp_size
        first = consumed_rows + self.dp_rank * rows_per_rank
        return self._batch(self.split, first, *self._mixture.rows(first, rows_per_rank))

    def row(self, index: int) -> StepBatch:
        """Return row ``index`` of the loader's endless sequence of rows, as a batch [1, S].

        The position from which ``next_step`` continues does not change.
        """
        return self._batch(self.split, index, *self._mixture.rows(index, 1))

    def last_batch(self) -> tuple[int, int, list[str]]:
        """Return which rows and documents the last training step had, on all ranks.

        Returns:
            Index of the first and of the last row in the endless sequence of rows, and ``file`` or
                ``file:line`` of each document.
        """
        end = self.consumed_rows
        first = end - self.rows_of_last_step
        sources, rows = self._mixture.rows(first, end - first)
        documents = [
            self._where(source, start)
            for source in np.unique(sources)
            for packed in [self._rows_of(self.split, source)]
            for start in packed.starts[packed.documents(rows[sources == source])]
        ]
        return first, end - 1, documents

    def batches(self, split: Split, n: int, source: int = 0) -> Iterator[StepBatch]:
        """Yield this rank's part of the first ``n`` global batches of a source's split.

        The rows are the same at every call, and no row comes twice. Rows of the validation split do
        not depend on the training seed. If the split is shorter than ``n`` batches, fewer are
        yielded, and padding rows without labels fill up the last one.

        Args:
            source: index of the source in ``names``.
        """
        packed = self._rows_of(split, source)
        step = self.config.train.global_batch_size
        for start in range(0, min(n * step, packed.num_rows), step):
            first = start + self.dp_rank * self.rows_per_rank
            indices = np.arange(first, first + self.rows_per_rank)
            sources = np.full(len(indices), source)
            rows = np.where(indices < packed.num_rows, indices, -1)
            yield self._batch(split, first, sources, rows)

    def every_pair(self, split: Split) -> Iterator[StepBatch]:
        """Yield this rank's rows of batches that hold each preference pair of ``split`` once.

        Padding rows fill up the last batch of each source.
        """
        for source in range(len(self.names)):
            yield from self.batches(split, self._rows_of(split, source).num_rows, source)

    def where_pair(self, number: int) -> str:
        """Return ``file:line`` of a preference pair.

        Args:
            number: index of the pair, counted over all sources in their order.
        """
        source = int(np.searchsorted(self._first_pairs, number, side="right")) - 1
        return self.corpora[source].where(number - int(self._first_pairs[source]))

    @property
    def num_pairs(self) -> int:
        """Number of preference pairs of all sources together."""
        return int(self._first_pairs[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the loader, equal on every rank.

        Returns:
            ``consumed_rows``, rows of all steps so far over all ranks; and ``fingerprint``, name ->
            value of everything that determines the order and content of rows.
        """
        return {"consumed_rows": self.consumed_rows, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in ``state``, under any number of ranks and any batch size.

        Args:
            state: result of ``state_dict``.

        Raises:
            DataError: the data changed since ``state`` was saved; the message lists what differs.
        """
        self.check_state(state)
        self.consumed_rows = int(state["consumed_rows"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ``DataError`` if the data changed since a checkpoint was saved.

        The message lists what differs. A state without a fingerprint is refused too: checkpoints of
        training sessions (``rl.session``) and of ``recipe=grpo`` name no data.

        Args:
            state: result of ``state_dict`` in the checkpoint.
        """
        if "fingerprint" not in (state or ()):
            raise DataError(
                "The checkpoint is of a session or of recipe=grpo, and names no rows to go on with. Begin from its "
                "weights: automoe export RUN --out DIR, then model.hf_path=DIR."
            )
        now = self.fingerprint()
        saved = completed(state["fingerprint"], now)
        differing = [
            f"{key} was {saved.get(key)}, is {now.get(key)}"
            for key in sorted(saved.keys() | now.keys())
            if saved.get(key) != now.get(key)
        ]
        if differing:
            raise DataError(
                "The data changed since the checkpoint, so training cannot continue from it: "
                f"{'; '.join(differing)}. "
                "Restore the data and settings of the checkpoint, or start a new run_dir with "
                "checkpoint.resume=auto. With other data a run begins from exported weights: "
                "automoe export RUN --out DIR, then model.hf_path=DIR."
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return name -> value of everything that determines the order and content of rows."""
        content = {
            "data.document_mask": self.config.data.document_mask,
            "data.val_fraction": self.config.data.val_fraction,
            "split": self.split,
            "tokenizer": self.tokenizer.digest,
            "train.seq_len": self.config.train.seq_len,
            "train.seed": self.config.train.seed,
            "data.sources": list(self.names),  # rows of a mixture depend on their order
        }
        for name, weight, source, corpus in zip(
            self.names, self.weights, self._sources, self.corpora, strict=True
        ):
            data = source.data
            facts = {
                "data.kind": data.kind,
                "files": len(corpus.paths),
                "documents": len(corpus.lengths),
                "text_bytes": corpus.text_bytes,
                "content": corpus.content,
            }
            if (template := chat_template_of(source)) is not None:
                facts |= {
                    "chat template": template.digest,
                    "data.chat.pack": data.chat.pack,
                    "data.on_long": data.on_long,
                }
            if corpus.chat and content["data.val_fraction"]:  # hashes decide which validate
                facts["conversations"] = xxhash.xxh3_64(corpus.hashes.tobytes()).hexdigest()
            if name:
                facts["weight"] = weight
            content |= {f"{name}: {key}" if name else key: value for key, value in facts.items()}
        return content

    def describe(self) -> list[str]:
        """Return lines to print at a run's start: its data, length in steps and epochs, warnings."""
        lines: list[str] = []
        for source, corpus in enumerate(self.corpora):
            if corpus.chat:
                lines += self._describe(source, corpus.chat)
        lines += describe_length(self.config, self.rows_per_epoch)
        return [*lines, *describe_unlearned(self.config, self.tokenizer, self.corpora)]

    def _describe(self, source: int, chat: dict[str, Any]) -> list[str]:
        """Return lines for the user about a source's conversations and the rows that they fill.

        Args:
            source: index of the source in ``names``.
            chat: counts of the source's conversations, ``TokenCorpus.chat``.
        """
        corpus = self.corpora[source]
        rows = self._rows_of(self.split, source)
        name = self.names[source]
        lines = [f"{name}:"] if name else []
        lines += describe_chat(
            chat,
            len(corpus.tokens),
            len(corpus.lengths),
            lambda file, line: f"{corpus.paths[file]}:{line}",
        )
        unit = "samples" if corpus.firsts is None else "pairs"
        if long := int((corpus.lengths > rows.seq_len).sum()):
            done = "cut, or left out if no answer begins before the cut"
            if self.config.data.on_long == "drop":
                done = "left out"
            lines.append(
                f"warning: {long:,} {unit} are longer than train.seq_len={rows.seq_len}: {done}"
            )
        full = rows.num_tokens / (rows.num_rows * rows.seq_len)
        lines.append(
            f"{len(rows.lengths):,} {unit} in {rows.num_rows:,} rows an epoch, {full:.1%} full"
        )
        return lines

    def _pack(self, split: Split, source: int) -> PackedRows:
        return pack(self.corpora[source], self._sources[source], split, self.tokenizer.pad_id)

    def _batch(
        self, split: Split, first_row: int, sources: np.ndarray, indices: np.ndarray
    ) -> StepBatch:
        """Return R rows of a split as a batch.

        Args:
            first_row: index of the first row in the sequence of rows over all ranks and steps.
            sources, indices: [R] source of each row, and its index within that source; -1 is a
                padding row.
        """
        rows = self._rows_of(split, sources[0]).take(np.full(len(indices), -1))
        for row, (source, index) in enumerate(zip(sources, indices, strict=True)):
            if index >= 0:
                self._rows_of(split, source).fill(rows, row, int(index))
        self._check_ids(split, sources, indices, rows)
        num_bytes = self.tokenizer.num_bytes(rows.labels[rows.labels != IGNORE])
        tensors = {name: torch.from_numpy(array) for name, array in vars(rows).items()}
        pairs = self._pairs(split, sources, indices) if self.config.data.is_preference else None
        return StepBatch(**tensors, num_bytes=num_bytes, first_row=first_row, pairs=pairs)

    def _pairs(self, split: Split, sources: np.ndarray, indices: np.ndarray) -> torch.Tensor:
        """Return the preference pairs of each row, as indices over all sources, [R, P] int64.

        P is the largest number of pairs in a row; a row with fewer pairs is filled up with -1.

        Args:
            sources, indices: [R] source of each row, and its index within that source; -1 is a
                padding row.
        """
        by_row = []
        for source, index in zip(sources, indices, strict=True):
            packed = self._rows_of(split, source)
            corpus = self.corpora[source]
            starts = packed.starts[packed.row_documents(int(index)) if index >= 0 else []]
            by_row.append(self._first_pairs[source] + np.searchsorted(corpus.starts, starts))
        numbers = np.full((len(by_row), max(1, *map(len, by_row))), -1)
        for row, of_row in zip(numbers, by_row, strict=True):
            row[: len(of_row)] = of_row
        return torch.from_numpy(numbers)

    def _where(self, source: int, start: int) -> str:
        """Return ``file`` or ``file:line`` of the document that contains a token.

        Args:
            source: index of the source.
            start: index of the token in the source's corpus.
        """
        corpus = self.corpora[source]
        return corpus.where(int(np.searchsorted(corpus.starts, start, side="right")) - 1)

    def _check_ids(
        self, split: Split, sources: np.ndarray, indices: np.ndarray, rows: Rows
    ) -> None:
        """Raise ``DataError`` if a token id of these rows is too large for the embedding.

        Corpora are verified when opened, but a cached file may be damaged while a job runs.

        Args:
            split: split that the rows are from.
            sources, indices: [n] source of each of the n rows, and its index within that source.
            rows: token ids and labels of these rows.
        """
        size = self.config.model.vocab_size
        bad = np.maximum(rows.tokens, rows.labels).max(axis=1, initial=0) >= size
        for source, index in zip(sources[bad], indices[bad], strict=True):
            packed = self._rows_of(split, source)
            for document in packed.row_documents(int(index)):
                start = int(packed.starts[document])
                tokens = packed.tokens[start : start + int(packed.lengths[document])]
                if (tokens >= size).any():
                    at = int(np.argmax(tokens >= size))
                    raise DataError(
                        f"{self._where(source, start)}: token {at} of this document is id {tokens[at]}, and the "
                        f"embedding ends at {size - 1} (model.vocab_size={size}). Start again: a damaged cache is "
                        "then rebuilt."
                    )
