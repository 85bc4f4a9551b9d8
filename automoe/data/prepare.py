"""From a configuration to a tokenised, split corpus, cached on disk; without torch, so that the
launcher can too.

The cache is memory mapped, and written once for all ranks of a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from automoe.config.data_schema import DataConfig
from automoe.config.schema import Config, sources_of
from automoe.data.chat import read_conversations
from automoe.data.chat_corpus import tokenise_chat
from automoe.data.chat_template import ChatTemplate, chat_template_of
from automoe.data.corpora import Document, find_files, read_documents, reader_digest
from automoe.data.tokenizer import BATCH, PIECE, Tokenizer, fitting_tokenizer
from automoe.errors import DataError
from automoe.storage.cache import default_cache_dir, open_entry

Split = Literal["train", "validation"]
FORMAT = 3  # part of the cache key: raise it when the files below change
# at least and at most; as many as make so many tokens
SYNTHETIC_ROWS = (64, 4096)
SYNTHETIC_TOKENS = 1 << 22
_SAMPLE = 1 << 16  # bytes hashed at either end of a file


@dataclass(frozen=True)
class TokenCorpus:
    """Every document's tokens, each ended by the tokenizer's EOS, in the corpus's own order.

    N documents: ``tokens`` [sum of lengths], ``starts`` and ``lengths`` [N] int64, ``hashes`` [N]
    uint64 of each text, ``file_ids`` and ``lines`` [N] int64.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    file_ids: np.ndarray
    lines: np.ndarray
    paths: list[Path]  # of the files
    content: str  # digest of all tokens and document lengths, whatever the files are called
    text_bytes: int
    # [N] of pairs, which are documents here: tokens of the preferred one
    firsts: np.ndarray | None = None
    # [sum of lengths] bool, of conversations: tokens to generate; None: all are
    trained: np.ndarray | None = None
    chat: dict[str, int] | None = None  # of conversations: counts of ``tokenise_chat``

    def where(self, index: int) -> str:
        """``file`` or ``file:line`` of a document."""
        return _place(self.paths[self.file_ids[index]], int(self.lines[index]))


def _place(path: Path, line: int) -> str:
    return f"{path}:{line}" if line else str(path)


def open_corpus(
    data: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path | None = None,
    template: ChatTemplate | None = None,
) -> TokenCorpus:
    """The tokenised corpus, from the cache or tokenised now.

    The cache entry's name covers the file list, sizes, times of change, both ends of each file, the
    tokenizer and the reading options, so a changed file is read again.

    Raises:
        DataError: text that cannot be read, or a cache directory that cannot be written.
    """
    files = find_files(data)
    paths = list(files.values())
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    entry = cache_dir / f"{data.kind}-{_cache_key(data, files, tokenizer, template)}"

    def write(folder: Path) -> dict[str, Any]:
        if template is not None:
            read = read_conversations(data, paths)
            return tokenise_chat(folder, read, template, tokenizer.vocab_size, data.is_preference)
        return _tokenise(folder, read_documents(data, paths), tokenizer, paths)

    what = "the tokenised corpus"
    again = "the text is tokenised again"
    facts = open_entry(entry, write, what=what, again=again, error_type=DataError)
    columns = np.load(entry / "documents.npy", mmap_mode="r")
    lengths = columns[0].astype(np.int64)
    size = int(lengths.sum())
    dtype = np.dtype(facts["dtype"])
    empty = np.zeros(0, dtype)  # a file of no bytes cannot be mapped
    return TokenCorpus(
        tokens=np.memmap(entry / "tokens.bin", dtype=dtype, mode="r", shape=(size,))
        if size
        else empty,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        hashes=columns[1],
        file_ids=columns[2].astype(np.int64),
        lines=columns[3].astype(np.int64),
        paths=paths,
        content=facts["content"],
        text_bytes=facts["text_bytes"],
        firsts=columns[4].astype(np.int64) if data.is_preference else None,
        trained=np.memmap(entry / "trained.bin", dtype=np.bool_, mode="r", shape=(size,))
        if template
        else None,
        chat=facts.get("chat"),
    )


def _cache_key(
    data: DataConfig,
    files: dict[str, Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
) -> str:
    key = hashlib.blake2b(template.digest.encode() if template is not None else b"", digest_size=16)
    key.update(
        json.dumps([FORMAT, tokenizer.digest, data.kind, data.text_key, data.max_bytes]).encode()
    )
    key.update(reader_digest(data.kind).encode())
    if template is not None:
        # which render it
        key.update(version("transformers").encode() + template.tokenizer_settings())
    for name, path in files.items():
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                sample = file.read(_SAMPLE)
                file.seek(max(len(sample), stat.st_size - _SAMPLE))
                sample += file.read(_SAMPLE)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}). Check the file."
            ) from error
        key.update(json.dumps([name, stat.st_size, stat.st_mtime_ns]).encode() + sample)
    return key.hexdigest()


def _tokenise(
    folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, paths: list[Path]
) -> dict[str, Any]:
    """Write tokens and the table of documents; what of the text is in memory at once does not grow
    with the text."""
    batch: list[Document] = []
    chars = 0
    with (folder / "tokens.bin").open("wb") as file:
        writer = _Writer(file, tokenizer, paths)
        for _, group in groupby(documents, key=lambda document: (document.file, document.line)):
            parts = iter(group)
            first = next(parts)
            second = next(parts, None)
            long = second is not None or len(first.text) > PIECE
            if not long:
                batch.append(first)
                chars += len(first.text)
            if long or chars >= BATCH:
                writer.short(batch)
                batch = []
                chars = 0
            if long:
                writer.long(chain([first] if second is None else [first, second], parts))
        writer.short(batch)
    np.save(folder / "documents.npy", writer.columns())
    return writer.facts()


class _Writer:
    """Documents as tokens at the end of ``file``, each followed by the end of text, and a row a
    document in a table."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, paths: list[Path]) -> None:
        self.file = file
        self.tokenizer = tokenizer
        self.paths = paths
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self.eos = np.array([tokenizer.eos_id])
        # length, hash of the text, file, line; a list of tuples would take ten times as much
        self.table = array("Q")
        self.digest = hashlib.blake2b(digest_size=16)
        self.text_bytes = 0

    def short(self, documents: list[Document]) -> None:
        """Documents that are encoded together."""
        encoded = self.tokenizer.encode_batch([document.text for document in documents])
        for document, ids in zip(documents, encoded, strict=True):
            text_hash = hashlib.blake2b(document.text.encode(), digest_size=8)
            self.text_bytes += len(document.text.encode())
            self._end(document, self._write(document, ids), text_hash)

    def long(self, parts: Iterator[Document]) -> None:
        """One document in parts."""
        document = next(parts)
        text_hash = hashlib.blake2b(digest_size=8)

        def texts() -> Iterator[str]:
            for part in chain([document], parts):
                raw = part.text.encode()
                text_hash.update(raw)
                self.text_bytes += len(raw)
                yield part.text

        length = sum(self._write(document, ids) for ids in self.tokenizer.encode_long(texts()))
        self._end(document, length, text_hash)

    def _write(self, document: Document, ids: np.ndarray) -> int:
        if len(ids) and (largest := int(ids.max())) >= self.tokenizer.vocab_size:
            size = self.tokenizer.vocab_size
            raise DataError(
                f"{_place(self.paths[document.file], document.line)}: the tokenizer makes id {largest} of this text, "
                f"and says that its {size} ids end at {size - 1}. Copy its files again."
            )
        tokens = ids.astype(self.dtype).tobytes()
        self.digest.update(tokens)
        self.file.write(tokens)
        return len(ids)

    def _end(self, document: Document, length: int, text_hash: Any) -> None:
        self._write(document, self.eos)
        text_hash = int.from_bytes(text_hash.digest(), "little")
        self.table.extend((length + 1, text_hash, document.file, document.line))

    def columns(self) -> np.ndarray:
        """The table, [4, N] uint64."""
        return np.frombuffer(self.table, dtype=np.uint64).reshape(-1, 4).T.copy()

    def facts(self) -> dict[str, Any]:
        """What else the corpus is, once all is written."""
        self.digest.update(self.columns()[0].tobytes())
        return {
            "dtype": self.dtype.name,
            "content": self.digest.hexdigest(),
            "text_bytes": self.text_bytes,
        }


def prepare_data(
    config: Config, cache_dir: Path | None = None
) -> tuple[Tokenizer, list[TokenCorpus]]:
    """Open the corpus of each source, tokenised into the cache if it is not there yet, and refuse
    what cannot train.

    Called before ranks start, it finds bad text while one process is there to say so, and leaves
    the ranks a cache to map.

    Args:
        cache_dir: where the tokenised corpus is kept; None is ``default_cache_dir()``.

    Raises:
        ConfigError: a tokenizer that cannot be loaded or is larger than the embedding.
        DataError: text that cannot be read, a document too long under ``on_long=error``, or an
            empty split.
    """
    tokenizer = fitting_tokenizer(config)
    sources = [replace(config, data=source) for _, _, source in sources_of(config.data)]
    if config.data.is_synthetic:
        return tokenizer, [synthetic_corpus(config.model.vocab_size, config.train.seq_len)]
    corpora = [
        open_corpus(one.data, tokenizer, cache_dir, chat_template_of(one)) for one in sources
    ]
    for one, corpus in zip(sources, corpora, strict=True):
        _check_corpus(one, corpus)
    return tokenizer, corpora


def synthetic_corpus(vocab_size: int, seq_len: int) -> TokenCorpus:
    """Documents of one row each, whose ids are drawn evenly from the vocabulary: the same ones
    everywhere, no text."""
    count = max(SYNTHETIC_ROWS[0], min(SYNTHETIC_ROWS[1], SYNTHETIC_TOKENS // seq_len))
    # raw bits are promised to stay
    generator = np.random.PCG64(np.random.SeedSequence((vocab_size, seq_len)))
    hashes = generator.random_raw(count)
    tokens = (generator.random_raw(count * seq_len) % np.uint64(vocab_size)).astype(np.uint32)
    return TokenCorpus(
        tokens=tokens,
        starts=np.arange(count) * seq_len,
        lengths=np.full(count, seq_len),
        hashes=hashes,
        file_ids=np.zeros(count, dtype=np.int64),
        lines=np.arange(1, count + 1),
        paths=[Path("synthetic")],
        content=hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest(),
        text_bytes=0,
    )


def _check_corpus(config: Config, corpus: TokenCorpus) -> None:
    """A document too long under ``on_long=error``, and an empty split, are errors."""
    data = config.data
    too_long = np.flatnonzero(corpus.lengths > config.train.seq_len)
    if len(too_long) and data.on_long == "error":
        what, others = (
            ("conversation", "drop or truncate") if data.is_chat else ("document", "split")
        )
        if data.is_preference:
            what = "pair"
            others = "drop"
        counted = "" if data.is_chat else ", its end-of-text token counted,"
        raise DataError(
            f"{corpus.where(too_long[0])}: a {what} of {corpus.lengths[too_long[0]]} tokens{counted} does not fit "
            f"train.seq_len={config.train.seq_len} under data.on_long=error ({len(too_long)} of "
            f"{len(corpus.lengths)} {what}s do not; the longest has {corpus.lengths.max()}). Shorten it, raise "
            f"train.seq_len, or set data.on_long={others}."
        )
    fitting_documents(corpus, config, "train")
    if config.train.val_every:
        fitting_documents(corpus, config, "validation")


def fitting_documents(
    corpus: TokenCorpus, config: Config, split: Split
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the documents of one split, as rows hold them.

    Text is cut by its rows. Conversations longer than one are left out (``data.on_long=drop``), or
    lose their end (``truncate``; those that have no token to train on then are left out as well).

    Raises:
        DataError: nothing is left for the split.
    """
    starts, lengths = split_documents(corpus, config.data.val_fraction, split)
    seq_len = config.train.seq_len
    long = lengths > seq_len
    if corpus.trained is None or not long.any():
        return starts, lengths
    kept = ~long
    if config.data.on_long == "truncate":
        lengths = np.minimum(lengths, seq_len)
        for place in np.flatnonzero(long):
            kept[place] = corpus.trained[starts[place] + 1 : starts[place] + seq_len].any()
    if not kept.any():
        what = "pair of answers" if config.data.is_preference else "conversation"
        cut = config.data.on_long == "truncate"
        why = (
            ", and no answer begins before that"
            if cut
            else f" (the shortest has {lengths.min()} tokens)"
        )
        raise DataError(
            f"No {what} is left for the {split} split: all {len(lengths)} are longer than train.seq_len={seq_len}{why}"
            f", under data.on_long={config.data.on_long}. Raise train.seq_len."
        )
    return starts[kept], lengths[kept]


def split_documents(
    corpus: TokenCorpus, val_fraction: float, split: Split
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the documents of one split.

    A document belongs to validation when the hash of its text, read as a fraction of 2**64, is
    below ``val_fraction``: equal texts never stand on both sides, and adding documents moves none.
    If that leaves a side empty, the document of lowest hash alone is validation; a corpus of one
    document gives up its tail.

    Raises:
        DataError: nothing is left for the split.
    """
    starts = corpus.starts
    lengths = corpus.lengths
    if len(lengths) == 1 and val_fraction > 0 and corpus.trained is None:
        tail = max(2, round(int(lengths[0]) * val_fraction))  # two tokens make one label
        head = int(lengths[0]) - tail
        if head >= 2:
            return (
                (starts, lengths - tail) if split == "train" else (starts + head, np.array([tail]))
            )
    validation = corpus.hashes.astype(np.float64) / 2.0**64 < val_fraction
    if val_fraction > 0 and len(lengths) > 1 and (validation.all() or not validation.any()):
        validation = corpus.hashes == corpus.hashes.min()
    chosen = validation if split == "validation" else ~validation
    if not chosen.any():
        raise DataError(
            f"No document for the {split} split: {len(lengths)} documents, {int(lengths.sum())} tokens, "
            f"data.val_fraction={val_fraction}. Add documents or change data.val_fraction; without a validation "
            f"split set train.val_every=0."
        )
    return starts[chosen], lengths[chosen]
