"""A tokenised corpus on disk, memory mapped, written once for all ranks of a machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from automoe.config.schema import DataConfig
from automoe.data.corpora import CorpusFiles, Document, find_files, read_documents, reader_digest
from automoe.data.tokenizer import Tokenizer
from automoe.errors import DataError

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
    files: CorpusFiles
    content: str  # digest of all tokens and document lengths, whatever the files are called
    text_bytes: int

    def where(self, index: int) -> str:
        """``file`` or ``file:line`` of a document."""
        path, line = self.files.paths[self.file_ids[index]], int(self.lines[index])
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
    if not entry.is_dir():
        with _only_writer(entry):
            if not entry.is_dir():
                _write(entry, data, files, tokenizer)
    return _open(entry, files)


def _cache_key(data: DataConfig, files: CorpusFiles, tokenizer: Tokenizer) -> str:
    key = hashlib.blake2b(digest_size=16)
    key.update(json.dumps([FORMAT, tokenizer.digest, data.kind, data.text_key, data.max_bytes]).encode())
    key.update(reader_digest(data.kind).encode())
    for path, name in zip(files.paths, files.names, strict=True):
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


@contextmanager
def _only_writer(entry: Path) -> Iterator[None]:
    """Hold the entry's lock, which the system drops when its holder dies."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = open(entry.with_suffix(".lock"), "w")
    except OSError as error:
        raise _unwritable(entry.parent, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(directory: Path, error: OSError) -> DataError:
    return DataError(
        f"{directory}: the tokenised corpus cannot be written here ({error.strerror}). Make room or make it "
        f"writable, or set XDG_CACHE_HOME to a directory that is."
    )


def _write(entry: Path, data: DataConfig, files: CorpusFiles, tokenizer: Tokenizer) -> None:
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    except OSError as error:
        raise _unwritable(entry.parent, error) from error
    try:
        _tokenise(temporary, read_documents(data, files), tokenizer)
        if not entry.is_dir():  # another machine on a shared file system may have been faster
            temporary.rename(entry)
    except OSError as error:
        if not entry.is_dir():
            raise _unwritable(entry.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def _open(entry: Path, files: CorpusFiles) -> TokenCorpus:
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
        files=files,
        content=meta["content"],
        text_bytes=meta["text_bytes"],
    )
