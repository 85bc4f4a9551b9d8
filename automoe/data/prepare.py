"""From a configuration to a tokenised, split corpus, cached on disk; without torch, so that the launcher can too.

The cache is memory mapped, and written once for all ranks of a machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from automoe.config.schema import Config, DataConfig
from automoe.data.corpora import Document, find_files, read_documents, reader_digest
from automoe.data.tokenizer import Tokenizer, fitting_tokenizer
from automoe.errors import DataError

Split = Literal["train", "validation"]
FORMAT = 1  # part of the cache key: raise it when the files below change
_BATCH_CHARS = 1 << 22  # text tokenised at a time
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

    def where(self, index: int) -> str:
        """``file`` or ``file:line`` of a document."""
        path, line = self.paths[self.file_ids[index]], int(self.lines[index])
        return f"{path}:{line}" if line else str(path)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/automoe``, or ``~/.cache/automoe``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "automoe"


def open_corpus(data: DataConfig, tokenizer: Tokenizer, cache_dir: Path | None = None) -> TokenCorpus:
    """The tokenised corpus, from the cache or tokenised now.

    The cache entry's name covers the file list, sizes, times of change, both ends of each file, the
    tokenizer and the reading options, so a changed file is read again. One process of a machine
    writes; the others wait for it. A rename makes the entry visible whole or not at all.

    Raises:
        DataError: text that cannot be read, or a cache directory that cannot be written.
    """
    files = find_files(data)
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    entry = cache_dir / f"{data.kind}-{_cache_key(data, files, tokenizer)}"
    try:
        if not entry.is_dir():
            _write(entry, read_documents(data, files.values()), tokenizer)
    except OSError as error:
        if not entry.is_dir():  # another machine on a shared file system may have been faster
            raise DataError(
                f"{cache_dir}: the tokenised corpus cannot be written here ({error.strerror}). Make room or make it "
                f"writable, or set XDG_CACHE_HOME to a directory that is."
            ) from error
    return _open(entry, list(files.values()))


def _cache_key(data: DataConfig, files: dict[str, Path], tokenizer: Tokenizer) -> str:
    key = hashlib.blake2b(digest_size=16)
    key.update(json.dumps([FORMAT, tokenizer.digest, data.kind, data.text_key, data.max_bytes]).encode())
    key.update(reader_digest(data.kind).encode())
    for name, path in files.items():
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                sample = file.read(_SAMPLE)
                file.seek(max(len(sample), stat.st_size - _SAMPLE))
                sample += file.read(_SAMPLE)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}). Check the file.") from error
        key.update(json.dumps([name, stat.st_size, stat.st_mtime_ns]).encode() + sample)
    return key.hexdigest()


def _write(entry: Path, documents: Iterable[Document], tokenizer: Tokenizer) -> None:
    """Make the entry unless another process of the machine does; the system drops the lock of one that dies."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with open(entry.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not entry.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"{entry.name}.", dir=entry.parent) as temporary:
                _tokenise(Path(temporary), documents, tokenizer)
                os.rename(temporary, entry)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _tokenise(directory: Path, documents: Iterable[Document], tokenizer: Tokenizer) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    digest = hashlib.blake2b(digest_size=16)
    eos = np.array([tokenizer.eos_id], dtype=dtype)
    table: list[tuple[int, int, int, int]] = []  # length, hash of the text, file, line
    text_bytes = 0
    with (directory / "tokens.bin").open("wb") as file:
        for batch in _batches(documents):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                raw = document.text.encode()
                text_hash = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
                table.append((len(ids) + 1, text_hash, document.file, document.line))
                text_bytes += len(raw)
                tokens = np.concatenate([ids.astype(dtype), eos]).tobytes()
                digest.update(tokens)
                file.write(tokens)
        file.flush()
        os.fsync(file.fileno())
    columns = np.array(table, dtype=np.uint64).reshape(-1, 4).T.copy()
    digest.update(columns[0].tobytes())
    np.save(directory / "documents.npy", columns)
    meta = {"dtype": dtype.name, "content": digest.hexdigest(), "text_bytes": text_bytes}
    (directory / "meta.json").write_text(json.dumps(meta))


def _open(entry: Path, paths: list[Path]) -> TokenCorpus:
    try:
        meta: dict[str, Any] = json.loads((entry / "meta.json").read_text())
        columns = np.load(entry / "documents.npy")
        lengths = columns[0].astype(np.int64)
        shape = (int(lengths.sum()),)
        dtype = np.dtype(meta["dtype"])
        size = (entry / "tokens.bin").stat().st_size
        if size != shape[0] * dtype.itemsize:
            raise ValueError(f"tokens.bin has {size} bytes, not {shape[0] * dtype.itemsize}")
        empty = np.zeros(0, dtype)  # a file of no bytes cannot be mapped
        tokens = np.memmap(entry / "tokens.bin", dtype=dtype, mode="r", shape=shape) if shape[0] else empty
    except (OSError, ValueError) as error:
        raise DataError(f"{entry}: damaged cache of the tokenised corpus ({error}). Delete this directory.") from error
    return TokenCorpus(
        tokens=tokens,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        hashes=columns[1],
        file_ids=columns[2].astype(np.int64),
        lines=columns[3].astype(np.int64),
        paths=paths,
        content=meta["content"],
        text_bytes=meta["text_bytes"],
    )


def prepare_data(config: Config, cache_dir: Path | None = None) -> tuple[Tokenizer, TokenCorpus]:
    """Open the corpus, tokenised into the cache if it is not there yet, and refuse what cannot train.

    Called before ranks start, it finds bad text while one process is there to say so, and leaves the
    ranks a cache to map.

    Args:
        cache_dir: where the tokenised corpus is kept; None is ``default_cache_dir()``.

    Raises:
        ConfigError: a tokenizer that cannot be loaded or is larger than the embedding.
        DataError: text that cannot be read, a document too long under ``on_long=error``, or an empty split.
    """
    tokenizer = fitting_tokenizer(config)
    corpus = open_corpus(config.data, tokenizer, cache_dir)
    too_long = np.flatnonzero(corpus.lengths > config.train.seq_len)
    if len(too_long) and config.data.on_long == "error":
        raise DataError(
            f"{corpus.where(too_long[0])}: a document of {corpus.lengths[too_long[0]]} tokens, its end-of-text token "
            f"counted, does not fit train.seq_len={config.train.seq_len} under data.on_long=error ({len(too_long)} of "
            f"{len(corpus.lengths)} documents do not; the longest has {corpus.lengths.max()}). Shorten it, raise "
            f"train.seq_len, or set data.on_long=split."
        )
    split_documents(corpus, config.data.val_fraction, "train")
    if config.train.val_every:
        split_documents(corpus, config.data.val_fraction, "validation")
    return tokenizer, corpus


def split_documents(corpus: TokenCorpus, val_fraction: float, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the documents of one split.

    A document belongs to validation when the hash of its text, read as a fraction of 2**64, is below
    ``val_fraction``: equal texts never stand on both sides, and adding documents moves none. If that
    leaves a side empty, the document of lowest hash alone is validation; a corpus of one document
    gives up its tail.

    Raises:
        DataError: nothing is left for the split.
    """
    starts, lengths = corpus.starts, corpus.lengths
    if len(lengths) == 1 and val_fraction > 0:
        tail = max(2, round(int(lengths[0]) * val_fraction))  # two tokens make one label
        head = int(lengths[0]) - tail
        if head >= 2:
            return (starts, lengths - tail) if split == "train" else (starts + head, np.array([tail]))
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
