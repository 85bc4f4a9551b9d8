"""Tokenisation of documents into the files of a corpus, in bounded memory."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from automoe.data.corpora import Document
from automoe.data.tokenizer import BATCH, PIECE, Tokenizer
from automoe.errors import DataError
from automoe.storage.guarded import doing


class CorpusWriter:
    """Writer of a tokenised corpus: arrays of tokens, a table of documents, and their digest.

    The table has one row per document: length in tokens, hash of the text, index of the file, line
    in it, and for preference pairs the length of the first sequence.

    Args:
        vocab_size: largest token id + 1.
        num_columns: columns of the table: 5 for preference pairs, else 4.

    Attributes:
        dtype: NumPy type of a token in its file: uint16 if every id fits, else uint32.
        text_bytes: UTF-8 bytes of all texts, which the caller adds up.
    """

    def __init__(self, vocab_size: int, num_columns: int = 4) -> None:
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.num_columns = num_columns
        self.text_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._table = array("Q")  # A list of tuples would take ten times the memory.

    def write(self, file: BinaryIO, values: np.ndarray) -> None:
        raw = values.tobytes()
        self._digest.update(raw)
        file.write(raw)

    def end(self, length: int, text_hash: Any, *place: int) -> None:
        """Add a row to the table for a document whose tokens have just been written.

        Args:
            length: number of tokens of the document.
            text_hash: BLAKE2b object of 8 bytes, fed with the text.
            place: index of the file; line; and for preference pairs the length of the first
                sequence.
        """
        self._table.extend((length, int.from_bytes(text_hash.digest(), "little"), *place))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the table of documents to ``folder / "documents.npy"``, uint64 [4 or 5, documents]; return a summary.

        The rows are: length in tokens, hash of the text, index of the file, line there and, for
        preference pairs, length of the first answer's sequence. The method ``write`` has written
        the tokens before.

        Returns:
            ``dtype``, name of the NumPy type of a token; ``content``, digest of tokens, loss masks
            and lengths; and ``text_bytes``, UTF-8 bytes of all texts.
        """
        columns = np.frombuffer(self._table, np.uint64).reshape(-1, self.num_columns).T.copy()
        np.save(folder / "documents.npy", columns)
        self._digest.update(columns[0].tobytes() + columns[4:].tobytes())
        return {
            "dtype": self.dtype.name,
            "content": self._digest.hexdigest(),
            "text_bytes": self.text_bytes,
        }


def tokenise_documents(
    folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, paths: list[Path]
) -> dict[str, Any]:
    """Write each document's ids and EOS to ``folder``/tokens.bin, and a table of documents to documents.npy.

    The table is uint64 [4, documents]: length in tokens, hash of the text, number of the file, line
    in it. Short documents are encoded together, long ones in pieces.

    Args:
        paths: the corpus's files, for error messages.

    Returns:
        ``dtype``, name of the NumPy type of a token; ``content``, digest of tokens and lengths; and
        ``text_bytes``, UTF-8 bytes of all texts.

    Raises:
        DataError: the tokenizer returns an id beyond its own vocabulary.
    """
    batch = []
    chars = 0
    with (folder / "tokens.bin").open("wb") as file:
        writer = _DocumentWriter(file, tokenizer, paths)
        for _, group in groupby(documents, key=lambda document: (document.file, document.line)):
            rest = iter(group)
            parts = list(islice(rest, 2))
            long = len(parts) > 1 or len(parts[0].text) > PIECE
            if not long:
                batch += parts
                chars += len(parts[0].text)
            if long or chars >= BATCH:
                writer.add_short(batch)
                batch = []
                chars = 0
            if long:
                writer.add_long(parts[0], chain(parts, rest))
        writer.add_short(batch)
    return writer.save(folder)


def place_of(path: Path, line: int) -> str:
    """Return the place of a document: ``file:line``, or ``file`` if it is the whole file (line 0)."""
    return f"{path}:{line}" if line else str(path)


class _DocumentWriter(CorpusWriter):
    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, paths: list[Path]) -> None:
        super().__init__(tokenizer.vocab_size)
        self.file = file
        self.tokenizer = tokenizer
        self.paths = paths

    def add_short(self, documents: list[Document]) -> None:
        encoded = self.tokenizer.encode_batch([document.text for document in documents])
        for document, ids in zip(documents, encoded, strict=True):
            raw = document.text.encode()
            self.text_bytes += len(raw)
            self._add(document, [ids], hashlib.blake2b(raw, digest_size=8))

    def add_long(self, document: Document, parts: Iterable[Document]) -> None:
        text_hash = hashlib.blake2b(digest_size=8)

        def texts() -> Iterator[str]:
            for part in parts:
                raw = part.text.encode()
                text_hash.update(raw)
                self.text_bytes += len(raw)
                yield part.text

        self._add(document, self.tokenizer.encode_long(texts()), text_hash)

    def _add(self, document: Document, encoded: Iterable[np.ndarray], text_hash: Any) -> None:
        """Write a document's token ids and an EOS, and add the document to the table.

        Args:
            encoded: arrays of ids, which together are the document's ids.
            text_hash: BLAKE2b hash of the document's text. It is complete once ``encoded`` has been
                read to its end, since producing the ids may update it.

        Raises:
            DataError: an id is beyond the tokenizer's vocabulary.
        """
        size = self.tokenizer.vocab_size
        length = 0
        for ids in chain(encoded, [np.array([self.tokenizer.eos_id])]):
            if (largest := int(ids.max(initial=0))) >= size:
                raise DataError(
                    f"{place_of(self.paths[document.file], document.line)}: the tokenizer makes "
                    f"id {largest} of this text, and says that its {size} ids end at {size - 1}. "
                    "Copy its files again."
                )
            self.write(self.file, ids.astype(self.dtype))
            length += len(ids)
        self.end(length, text_hash, document.file, document.line)
        doing(f"{self.paths[document.file]}: reading")
