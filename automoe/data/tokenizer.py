"""Text to token ids and back: plain bytes, or any local HuggingFace tokenizer directory.

Importing this module loads neither torch, transformers nor tokenizers; the byte tokenizer never does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automoe.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

    from automoe.config.schema import Config

BYTE_VOCAB_SIZE = 258  # 256 bytes, end of text, padding

# Files that decide how text becomes ids, for the digest of a directory without a tokenizer.json.
_VOCAB_FILES = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer.model", "spiece.model")


class Tokenizer:
    """What the data pipeline asks of a tokenizer.

    Attributes:
        vocab_size: largest id + 1; an embedding needs at least this many rows.
        eos_id, pad_id: end of a document; filler that is never trained.
        digest: changes when the same text could give other ids.
        byte_lengths: [vocab_size] int64, UTF-8 bytes that each id stands for; 0 for special tokens.
    """

    vocab_size: int
    eos_id: int
    pad_id: int
    digest: str
    byte_lengths: np.ndarray

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, [T] int64, without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        raise NotImplementedError

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """UTF-8 bytes that ``ids`` stand for together."""
        return int(self.byte_lengths[np.asarray(ids, dtype=np.int64)].sum())


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte; 256 ends a document, 257 pads."""

    def __init__(self) -> None:
        self.digest = "byte"
        self.vocab_size, self.eos_id, self.pad_id = BYTE_VOCAB_SIZE, 256, 257
        self.byte_lengths = np.array([1] * 256 + [0, 0], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        kept = [int(i) for i in ids if i < 256]
        return bytes(kept).decode(errors="replace")


class HFTokenizer(Tokenizer):
    """A HuggingFace tokenizer directory, through ``tokenizers`` (``transformers`` only to convert older files).

    Special tokens that are spelled out in a document are encoded as the plain text they are: a corpus
    cannot end a document or open a chat turn by quoting one.

    Raises:
        ConfigError: the directory is missing, unreadable, or names no end-of-text token.
    """

    def __init__(self, path: str) -> None:
        directory = Path(path).expanduser()
        if not directory.is_dir():
            raise ConfigError(
                "data.tokenizer",
                path,
                "a tokenizer is 'byte' or a local directory, and this directory does not exist",
                "Set data.tokenizer=byte or the path of a directory with a tokenizer.json; nothing is downloaded.",
            )
        if (directory / "tokenizer.json").is_file():
            self._backend, eos_id = _load_fast(directory)
            files = ["tokenizer.json"]
        else:
            self._backend, eos_id = _load_with_transformers(directory)
            files = [name for name in _VOCAB_FILES if (directory / name).is_file()]
        # Saved truncation or padding would silently cut documents or add tokens.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        if eos_id is None:
            raise ConfigError(
                "data.tokenizer",
                path,
                "every document ends in an end-of-text token, and this tokenizer names none",
                f"Set eos_token in {directory / 'tokenizer_config.json'}.",
            )
        self.eos_id = self.pad_id = eos_id
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(max(vocab.values()), eos_id) + 1
        hashed = hashlib.blake2b(digest_size=16)
        for name in files:
            hashed.update((directory / name).read_bytes())
        self.digest = f"{hashed.hexdigest()}-eos{eos_id}"
        self.byte_lengths = _byte_lengths(self._backend, vocab, self.vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(spec: str) -> Tokenizer:
    """``byte``, or the path of a HuggingFace tokenizer directory. Raises ConfigError."""
    return ByteTokenizer() if spec == "byte" else HFTokenizer(spec)


def fitting_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of ``config``. Raises ConfigError, also for one with more ids than the embedding has rows."""
    name, path = config.data.tokenizer, config.model.hf_path
    tokenizer = load_tokenizer(name)
    size, rows = tokenizer.vocab_size, config.model.vocab_size
    if size > rows:
        remedy = f"Nearest valid choice: model.vocab_size={8 * -(-size // 8)}"
        if path is not None:  # its embedding has the rows it has
            remedy = f"Set data.tokenizer={path} for the checkpoint's own, or a smaller one"
        rule = f"the tokenizer {name} makes ids up to {size - 1}, and the embedding ends at {rows - 1}"
        raise ConfigError("model.vocab_size", rows, rule, remedy)
    return tokenizer


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "data.tokenizer",
        str(path.parent),
        f"{path} cannot be read: {why}",
        "Copy the tokenizer again; a Git LFS pointer in its place needs `git lfs pull`.",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(content, dict):
        raise _unreadable(path, "not a JSON object")
    return content


def _load_fast(directory: Path) -> tuple[tokenizers.Tokenizer, int | None]:
    from tokenizers import Tokenizer as Backend

    path = directory / "tokenizer.json"
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises the bare Exception for any malformed file
        raise _unreadable(path, str(error)) from error
    return backend, _find_eos(directory, backend)


def _find_eos(directory: Path, backend: tokenizers.Tokenizer) -> int | None:
    """The end-of-text id that the directory names, in the order in which transformers looks."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file():
            token = _read_json(directory / name).get("eos_token")
            token = token["content"] if isinstance(token, dict) else token
            if token is not None and backend.token_to_id(token) is not None:
                return backend.token_to_id(token)
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            eos_id = _read_json(directory / name).get("eos_token_id")
            eos_id = eos_id[0] if isinstance(eos_id, list) else eos_id
            if eos_id is not None:
                return int(eos_id)
    return None


def _load_with_transformers(directory: Path) -> tuple[tokenizers.Tokenizer, int | None]:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        backend = loaded.backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(
            "data.tokenizer",
            str(directory),
            f"there is no tokenizer.json in it, and transformers cannot make one ({' '.join(str(error).split())})",
            "Point data.tokenizer at a directory with a tokenizer.json (save_pretrained of a fast tokenizer "
            "writes one).",
        ) from error
    return backend, loaded.eos_token_id


def _byte_lengths(backend: tokenizers.Tokenizer, vocab: dict[str, int], vocab_size: int) -> np.ndarray:
    """UTF-8 bytes per id, [vocab_size], from the way the tokenizer's decoder spells pieces."""
    spec = json.loads(backend.to_str())
    decoder = json.dumps(spec["decoder"])
    added = {token["id"]: token for token in spec["added_tokens"]}
    lengths = np.zeros(vocab_size, dtype=np.int64)
    for piece, index in vocab.items():
        if index in added:
            lengths[index] = 0 if added[index]["special"] else len(piece.encode())
        elif '"ByteLevel"' in decoder:
            lengths[index] = len(piece)  # GPT-2's alphabet: one printable character per byte
        elif '"ByteFallback"' in decoder and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            lengths[index] = 1
        elif '"WordPiece"' in decoder:  # "##" continues a word; any other piece follows a space
            lengths[index] = len(piece[2:].encode()) if piece.startswith("##") else len(piece.encode()) + 1
        else:
            lengths[index] = len(piece.replace("\u2581", " ").encode())  # SentencePiece's visible space
    return lengths
