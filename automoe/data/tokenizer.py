"""Text to token ids and back: plain bytes, or any HuggingFace tokenizer.

Importing this module loads neither torch, transformers nor tokenizers; the byte tokenizer never
does.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automoe.config.data_schema import NO_TOKENIZER, ChatConfig
from automoe.config.hub import local_folder
from automoe.config.schema import Config, tokenizer_of
from automoe.config.shipped import shipped_folder
from automoe.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

BYTE_VOCAB_SIZE = 258  # 256 bytes, end of text, padding
PIECE = 1 << 17  # characters of a long text that are encoded at once
BATCH = 1 << 20  # characters of several texts, or pieces of one
TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
_CONTEXT = 512  # characters on either side of a cut that decide whether it changes any id

# Files that decide how text becomes ids, for the digest of a directory without a tokenizer.json.
_VOCAB_FILES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
)


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

    def encode_long(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """Ids of one text that comes in parts; joined, those of ``encode`` of the whole, in bounded
        memory."""
        return (self.encode(part) for part in parts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        raise NotImplementedError

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """UTF-8 bytes that ``ids`` stand for together."""
        return int(self.byte_lengths[np.asarray(ids, dtype=np.int64)].sum())


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte; 256 ends a document, 257 pads."""

    def __init__(self) -> None:
        self.digest = "byte"
        self.vocab_size = BYTE_VOCAB_SIZE
        self.eos_id = 256
        self.pad_id = 257
        self.byte_lengths = np.array([1] * 256 + [0, 0], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        kept = [int(i) for i in ids if i < 256]
        return bytes(kept).decode(errors="replace")

    @staticmethod
    def files() -> dict[str, str]:
        """Name -> content of the files by which ``transformers`` and ``load_tokenizer`` know this
        tokenizer."""
        # GPT-2's alphabet: one letter a byte
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = (byte for byte in range(256) if byte not in printable)
        letters = {byte: chr(byte) for byte in printable} | {
            byte: chr(256 + n) for n, byte in enumerate(others)
        }
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {
            "special": True
        }
        eos = "<|endoftext|>"
        pad = "<|pad|>"
        by_bytes = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        tokenizer = {
            "version": "1.0",
            "added_tokens": [
                {"id": 256, "content": eos} | flags,
                {"id": 257, "content": pad} | flags,
            ],
            "normalizer": None,
            "pre_tokenizer": by_bytes,
            "post_processor": None,
            "decoder": by_bytes,
            "model": {
                "type": "BPE",
                "vocab": {letters[byte]: byte for byte in range(256)},
                "merges": [],
            },
        }
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": pad}
        config |= {"clean_up_tokenization_spaces": False}
        return {
            "tokenizer.json": json.dumps(tokenizer),
            "tokenizer_config.json": json.dumps(config),
        }


class HFTokenizer(Tokenizer):
    """A HuggingFace tokenizer directory, through ``tokenizers`` (``transformers`` only to convert
    older files).

    Special tokens that are spelled out in a document are encoded as the plain text they are: a
    corpus cannot end a document or open a chat turn by quoting one.

    Raises:
        ConfigError: the directory is missing, unreadable, or names no end-of-text token.
    """

    def __init__(self, path: str) -> None:
        directory = local_folder(path)
        if not directory.is_dir():
            raise ConfigError(
                "data.tokenizer",
                path,
                "a tokenizer is 'byte', a directory or a Hub id, and this directory does not exist",
                "Set data.tokenizer=byte, the path of a directory with a tokenizer.json, or OWNER/NAME@main.",
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

    def encode_long(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """As ``Tokenizer.encode_long``, in pieces, cut where ``_is_clean`` finds that ids on both
        sides stay.

        Each piece is encoded behind the end of the one before, whose ids are then dropped: some
        tokenizers treat the beginning of a text in another way.
        """
        batch: list[tuple[str, str]] = []  # context, piece
        for pair in self._pieces(parts):
            batch.append(pair)
            if sum(len(piece) for _, piece in batch) >= BATCH:
                yield from self._encode_pieces(batch)
                batch = []
        yield from self._encode_pieces(batch)

    def _encode_pieces(self, batch: list[tuple[str, str]]) -> Iterator[np.ndarray]:
        whole = self.encode_batch([context + piece for context, piece in batch])
        for ids, head in zip(
            whole, self.encode_batch([context for context, _ in batch]), strict=True
        ):
            assert (ids[: len(head)] == head).all(), "the cut was found to be clean"
            yield ids[len(head) :]

    def _pieces(self, parts: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(context, piece) of a text: context is the end of the piece before, empty for the
        first."""
        context = ""
        rest = ""
        size = PIECE
        for part in (long[at : at + BATCH] for long in parts for at in range(0, len(long), BATCH)):
            rest += part
            while len(rest) >= size + _CONTEXT:
                cut = next(
                    (
                        at
                        for at in _cuts(rest, size)
                        if self._is_clean(context + rest, len(context) + at)
                    ),
                    None,
                )
                # no cut leaves the ids alone: the piece grows until there is one, or the text ends
                if cut is None:
                    size *= 2
                    continue
                yield context, rest[:cut]
                context = rest[cut - _CONTEXT : cut]
                rest = rest[cut:]
                size = PIECE
        if rest:
            yield context, rest

    def _is_clean(self, text: str, cut: int) -> bool:
        """Whether ids on either side of a cut are the same with and without the text beyond it, and
        with more of it."""
        near = text[cut - _CONTEXT : cut]
        far = text[max(0, cut - 2 * _CONTEXT) : cut]
        behind = text[cut : cut + _CONTEXT]
        a, b, c, d = (
            ids.tolist() for ids in self.encode_batch([near, near + behind, far, far + behind])
        )
        return b[: len(a)] == a and d[: len(c)] == c and b[len(a) :] == d[len(c) :]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


def _cuts(text: str, end: int) -> Iterator[int]:
    """Places up to ``end`` at which a text may be cut: behind the last lines, before the last
    words, anywhere."""
    for mark, offset in (("\n", 1), (" ", 0)):
        at = end
        for _ in range(16):
            at = text.rfind(mark, end // 2, at)
            if at < 0:
                break
            yield at + offset
    yield from range(end, end - 64, -1)


class NoTokenizer(Tokenizer):
    """Ids that stand for no text: ``data.kind=benchmark``."""

    def __init__(self, vocab_size: int) -> None:
        self.digest = NO_TOKENIZER
        self.vocab_size = vocab_size
        self.eos_id = 0
        self.pad_id = 0
        self.byte_lengths = np.zeros(vocab_size, dtype=np.int64)


def load_tokenizer(spec: str) -> Tokenizer:
    """``byte``, or a HuggingFace tokenizer's directory or pinned id, an export's of bytes too.
    Raises ConfigError."""
    if spec == "byte":
        return ByteTokenizer()
    path = local_folder(spec) / "tokenizer.json"
    content = ByteTokenizer.files()["tokenizer.json"]
    if (
        path.is_file()
        and path.stat().st_size == len(content.encode())
        and path.read_bytes() == content.encode()
    ):
        return ByteTokenizer()
    return HFTokenizer(spec)


def fitting_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of ``config``. Raises ConfigError, also for one with more ids than the
    embedding has rows."""
    name = tokenizer_of(config)
    path = config.model.hf_path
    if name == NO_TOKENIZER:
        return NoTokenizer(config.model.vocab_size)
    tokenizer = load_tokenizer(name)
    size = tokenizer.vocab_size
    rows = config.model.vocab_size
    if size > rows:
        remedy = f"Nearest valid choice: model.vocab_size={8 * -(-size // 8)}"
        if path is not None:  # its embedding has the rows it has
            remedy = f"Set data.tokenizer={path} for the checkpoint's own, or a smaller one"
            if name == path:
                remedy = "Copy the tokenizer that the checkpoint was published with, or set data.tokenizer to it"
        rule = (
            f"the tokenizer {name} makes ids up to {size - 1}, and the embedding ends at {rows - 1}"
        )
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
        loaded = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        backend = loaded.backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(
            "data.tokenizer",
            str(directory),
            f"there is no tokenizer.json in it, and transformers cannot make one ({' '.join(str(error).split())})",
            "Point data.tokenizer at a directory with a tokenizer.json (save_pretrained of a fast tokenizer "
            "writes one), or set data.tokenizer=byte.",
        ) from error
    return backend, loaded.eos_token_id


def _byte_lengths(
    backend: tokenizers.Tokenizer, vocab: dict[str, int], vocab_size: int
) -> np.ndarray:
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
            lengths[index] = (
                len(piece[2:].encode()) if piece.startswith("##") else len(piece.encode()) + 1
            )
        else:
            # SentencePiece's visible space
            lengths[index] = len(piece.replace("\u2581", " ").encode())
    return lengths


# ---------------------------------------------------------------- chat templates


def stored_template(chat: ChatConfig, tokenizer: str) -> str:
    """The chat template as it is stored, whatever its format: what says that it is there, and the
    same.

    Args:
        tokenizer: ``byte`` or a directory.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    chosen = chat.template
    if chosen is not None:
        path = (
            shipped_folder("conf") / "chat_template" / "plain.jinja"
            if chosen == "plain"
            else Path(chosen)
        )
        try:
            return path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            rule = f"the chat template cannot be read ({error})"
            raise ConfigError(
                "data.chat.template", chosen, rule, "Name a Jinja file, or plain"
            ) from error
    folder = local_folder(tokenizer)
    files = [folder / TEMPLATE, *sorted(folder.glob(f"{OTHER_TEMPLATES}/*.jinja"))]
    found = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not found and (folder / name).is_file():
            try:
                content = json.loads((folder / name).read_text(encoding="utf-8")).get(
                    "chat_template"
                )
            except (ValueError, AttributeError) as error:
                rule = f"{folder / name} is damaged ({error})"
                raise ConfigError("data.tokenizer", tokenizer, rule, "Copy it again") from error
            if content and not isinstance(content, str):
                content = json.dumps(content)
            found = content or ""
    if not found:
        raise ConfigError(
            "data.chat.template",
            None,
            f"the tokenizer {tokenizer} has no chat template, and conversations need one",
            "Set data.tokenizer to that of an instruct model, data.chat.template to a Jinja file, or "
            "data.chat.template=plain for lines of 'user: ...' and 'assistant: ...'",
        )
    return found


def load_for_templates(tokenizer: str) -> Any:
    """The tokenizer as ``transformers`` has it. Raises ConfigError."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        if tokenizer == "byte":
            for name, content in ByteTokenizer.files().items():
                Path(scratch, name).write_text(content, encoding="utf-8")
        folder = scratch if tokenizer == "byte" else str(local_folder(tokenizer))
        try:
            loaded = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError, AttributeError) as error:
            why = " ".join(str(error).split())
            rule = f"transformers, which renders conversations, cannot load it ({why})"
            raise ConfigError(
                "data.tokenizer", tokenizer, rule, "Copy the tokenizer's files again"
            ) from error
    return loaded
