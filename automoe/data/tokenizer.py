"""Tokenizers: plain bytes, or any HuggingFace tokenizer; and the chat template stored with one.

Importing this module loads neither torch, transformers nor tokenizers; nor does the byte tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automoe.config.data_schema import NO_TOKENIZER, ChatConfig
from automoe.config.hub import local_folder
from automoe.config.schema import Config, tokenizer_of
from automoe.config.shipped import shipped_folder
from automoe.config.tier import tier_of
from automoe.data.tokenizer_files import (
    byte_lengths,
    check_files,
    named_parts,
    settings_of,
    text_of,
    unreadable,
)
from automoe.errors import ConfigError, one_line
from automoe.storage.files import read_file
from automoe.storage.foreign import MAX_ID, is_there
from automoe.storage.guarded import doing, guarded

if TYPE_CHECKING:
    import tokenizers

BYTE_VOCAB_SIZE = 258  # 256 bytes, end of text, padding
_BYTE_FILES = Path(__file__).with_name("byte_tokenizer")
PIECE = 1 << 17  # characters of a long text that are encoded as one piece
BATCH = 1 << 20  # characters of the texts, or pieces of a text, that are encoded together
TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CONTEXT = 512  # characters on each side of a cut that show whether the cut changes an id

# Files that determine how text becomes ids, for the digest of a directory without tokenizer.json.
_VOCAB_FILES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
)


@dataclass(eq=False)
class Tokenizer:
    """Interface of a tokenizer for the data pipeline; the class itself serves synthetic data.

    Attributes:
        vocab_size: largest id + 1; an embedding needs at least this many rows.
        eos_id: id at the end of every document.
        pad_id: id of padding, which is never trained.
        digest: name or hash of everything that determines the ids of a text.
        byte_lengths: [vocab_size] int64, UTF-8 bytes that each id stands for; 0 for special tokens.
        special_ids: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` -> the id that the
            tokenizer's files name, for exports. ``pad_id`` may differ from it.
    """

    vocab_size: int
    eos_id: int
    pad_id: int
    digest: str
    byte_lengths: np.ndarray
    special_ids: dict[str, int | None] = field(default_factory=dict)

    def shares(self, number: int, other: Tokenizer | None) -> bool:
        """Return True if the id ``number`` decodes to the same text in both tokenizers.

        Without ``other``, or if the text is empty, return False.
        """
        text = self.decode([number]) if number >= 0 and other is not None else ""
        return other is not None and text != "" and text == other.decode([number])

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text``, [T] int64, without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def encode_long(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the ids of one text that comes in parts, in bounded memory.

        Concatenated, the arrays equal ``encode`` of the whole text.
        """
        return (self.encode(part) for part in parts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        raise NotImplementedError

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """Return the number of UTF-8 bytes that ``ids`` stand for."""
        return int(self.byte_lengths[np.asarray(ids, dtype=np.int64)].sum())


class ByteTokenizer(Tokenizer):
    """Tokenizer with one id per UTF-8 byte; id 256 ends a document, id 257 is padding."""

    def __init__(self) -> None:
        lengths = np.array([1] * 256 + [0, 0], dtype=np.int64)
        special = {"eos_token_id": 256, "pad_token_id": 257}
        super().__init__(BYTE_VOCAB_SIZE, 256, 257, "byte", lengths, special)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes([int(i) for i in ids if i < 256]).decode(errors="replace")

    @staticmethod
    def files() -> dict[str, str]:
        """Return name -> content of the files from which ``transformers`` loads this tokenizer.

        ``load_tokenizer`` recognises them too.
        """
        return {path.name: path.read_text("utf-8") for path in sorted(_BYTE_FILES.glob("*.json"))}


class HFTokenizer(Tokenizer):
    """HuggingFace tokenizer from a directory, run by ``tokenizers``.

    This class does not check the files: ``check_tokenizer`` does so once, before ranks start.
    ``transformers`` converts older files. A special token that a document spells out is encoded as
    plain text, so that no corpus can end a document or open a chat turn by quoting it.

    Args:
        path: a directory, or a pinned Hub id.

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
        if is_there(directory, "tokenizer.json"):
            from tokenizers import Tokenizer as Backend

            text = text_of(directory, "tokenizer.json")
            try:
                self._backend = Backend.from_str(text)
            except Exception as error:  # tokenizers raises a bare Exception for a malformed file.
                raise unreadable(directory / "tokenizer.json", str(error)) from error
            self.special_ids = {
                key: _find_special(directory, self._backend, key) for key in SPECIAL_IDS
            }
            files = ["tokenizer.json"]
        else:
            self._backend, self.special_ids = _load_with_transformers(directory)
            files = [name for name in _VOCAB_FILES if (directory / name).is_file()]
        # Truncation or padding of the saved tokenizer would cut documents or add tokens.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        eos_id = self.special_ids["eos_token_id"]
        if eos_id is None:
            raise ConfigError(
                "data.tokenizer",
                path,
                "every document ends in an end-of-text token, and this tokenizer has none",
                f"Set eos_token in {directory / 'tokenizer_config.json'}.",
            )
        self.eos_id = self.pad_id = eos_id
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(*vocab.values(), eos_id) + 1
        if not 0 <= eos_id <= self.vocab_size - 1 <= MAX_ID:
            rule = f"ids must be from 0 to {MAX_ID:,}, and one is {max(*vocab.values(), eos_id):,}"
            raise unreadable(directory / files[0], f"{rule} (eos_token_id={eos_id})")
        hashed = hashlib.blake2b(digest_size=16)
        for name in files:
            hashed.update((directory / name).read_bytes())
        self.digest = f"{hashed.hexdigest()}-eos{eos_id}"
        spec = json.loads(self._backend.to_str())
        self._named = named_parts(directory / "tokenizer.json", spec)
        self.byte_lengths = byte_lengths(spec, vocab, self.vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        doing(f"{self._named}, of {len(texts)} texts that begin {texts[:1]!r:.60}")
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encoded]

    def encode_long(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the ids of one text that comes in parts, in bounded memory.

        The text is cut into pieces where ``_is_clean`` finds that no id changes. Each piece is
        encoded with the end of the previous piece before it, whose ids are then dropped, because
        some tokenizers treat the beginning of a text differently.
        """
        batch = []  # context, piece
        for pair in self._pieces(parts):
            batch.append(pair)
            if sum(len(piece) for _, piece in batch) >= BATCH:
                yield from self._encode_pieces(batch)
                batch = []
        yield from self._encode_pieces(batch)

    def _encode_pieces(self, batch: list[tuple[str, str]]) -> Iterator[np.ndarray]:
        heads = self.encode_batch([context for context, _ in batch])
        whole = self.encode_batch([context + piece for context, piece in batch])
        for head, ids in zip(heads, whole, strict=True):
            assert (ids[: len(head)] == head).all(), "the cut was found to be clean"
            yield ids[len(head) :]

    def _pieces(self, parts: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield (context, piece): pieces of a text, each with the end of the previous piece as context."""
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
                # If every cut changes an id, the piece grows until one does not, or the text ends.
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
        """Return True if cutting ``text`` at index ``cut`` changes no id on either side.

        The ids near the cut must be equal with and without the text beyond it, and with more text
        before it.
        """
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
    """Yield indices near ``end`` at which to cut a text, best first.

    First the last line ends before ``end``, then the last spaces, then the 64 indices up to it.
    """
    for mark, offset in (("\n", 1), (" ", 0)):
        at = end
        for _ in range(16):
            at = text.rfind(mark, end // 2, at)
            if at < 0:
                break
            yield at + offset
    yield from range(end, end - 64, -1)


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that ``spec`` names.

    Args:
        spec: ``byte``, or the directory or pinned Hub id of a HuggingFace tokenizer. The files of
            an exported byte tokenizer give the byte tokenizer again.

    Raises:
        ConfigError: the directory is missing, unreadable, or names no end-of-text token.
    """
    if spec != "byte":
        path = local_folder(spec) / "tokenizer.json"
        content = ByteTokenizer.files()["tokenizer.json"].encode()
        if not path.is_file() or path.read_bytes() != content:
            return HFTokenizer(spec)
    return ByteTokenizer()


def tokenizer_beside(weights: str | Path | None) -> Tokenizer | None:
    """Return the tokenizer in the folder of checkpoint ``weights``; None if it has no readable one."""
    # transformers would make one without a token from config.json alone.
    files = (*_VOCAB_FILES, "tokenizer.json", "tiktoken.model")
    if weights is None or not any(is_there(local_folder(weights), name) for name in files):
        return None
    try:
        return load_tokenizer(str(weights))
    except ConfigError:
        return None


def pieces_of_new(config: Config) -> dict[int, list[int]]:
    """Return {id of a new token: ids into which ``model.hf_path``'s tokenizer splits its text}.

    An id is new if that tokenizer lacks it, or decodes it to another text. The result is {} unless
    ``model.new_rows=pieces``.

    Raises:
        ConfigError: a tokenizer cannot be loaded.
    """
    if config.model.new_rows != "pieces":
        return {}
    theirs, ours = load_tokenizer(str(config.model.hf_path)), fitting_tokenizer(config)
    new = [n for n in range(ours.vocab_size) if not ours.shares(n, theirs)]
    pieces = {n: theirs.encode(ours.decode([n])).tolist() for n in new}
    return {n: ids for n, ids in pieces.items() if ids}


def check_tokenizer(spec: str) -> None:
    """Check a tokenizer's files and try, in a child process, what could hang; call it before ranks start.

    Args:
        spec: ``byte``, or the directory or pinned Hub id of a HuggingFace tokenizer.

    Raises:
        ConfigError, CheckpointError: a file cannot be read, or a value has a wrong type.
        DataError: trying the tokenizer takes too long or too much memory, or ends the process.
    """
    directory = local_folder(spec)
    if spec in ("byte", NO_TOKENIZER) or not directory.is_dir():
        return
    check_files(directory)
    if not is_there(directory, "tokenizer.json"):
        guarded(f"{directory}: its tokenizer", lambda: _load_with_transformers(directory) and None)


def fitting_tokenizer(config: Config) -> Tokenizer:
    """Return the tokenizer of ``config``.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or has more ids than the embedding has rows.
    """
    name = tokenizer_of(config)
    path = config.model.hf_path
    rows = config.model.vocab_size
    if name == NO_TOKENIZER:
        return Tokenizer(rows, 0, 0, NO_TOKENIZER, np.zeros(rows, dtype=np.int64))
    tokenizer = load_tokenizer(name)
    size = tokenizer.vocab_size
    if size > rows:
        remedy = f"Nearest valid choice: model.vocab_size={8 * -(-size // 8)}"
        if path is not None:
            grows = tier_of(config.model).resizable
            remedy = f"{remedy} (new rows start as its mean), or " if grows else ""
            shipped = "the one that the checkpoint was published with" if name == path else path
            remedy += f"Set data.tokenizer={shipped}"
        raise ConfigError(
            "model.vocab_size",
            rows,
            f"the tokenizer {name} makes ids up to {size - 1}, and the embedding ends at {rows - 1}",
            remedy,
        )
    return tokenizer


def _find_special(directory: Path, backend: tokenizers.Tokenizer, key: str) -> int | None:
    """Return the id of a special token from the files of a tokenizer's directory; None if unnamed.

    The token's text comes from tokenizer_config.json, else from special_tokens_map.json. If neither
    names an end of text, its id comes from generation_config.json, else from config.json.

    Args:
        backend: the tokenizer, which maps the token's text to an id.
        key: ``bos_token_id``, ``eos_token_id`` or ``pad_token_id``.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = settings_of(directory, name).get(key.removesuffix("_id"))
        token = token["content"] if isinstance(token, dict) else token
        if token is not None and (number := backend.token_to_id(token)) is not None:
            return number
    # The model's own settings may name a padding that the tokenizer lacks; a text needs its end.
    for name in ("generation_config.json", "config.json") if key == "eos_token_id" else ():
        eos_id = settings_of(directory, name).get("eos_token_id")
        if isinstance(eos_id, list):
            eos_id = next(iter(eos_id), None)
        if eos_id is not None:
            return eos_id
    return None


def _by_transformers(folder: Path, tokenizer: str, rule: str, remedy: str) -> Any:
    """Load a tokenizer from a folder by ``transformers``, without the Hub.

    Args:
        tokenizer: value of ``data.tokenizer``, for the error.
        rule, remedy: texts of the error: what must hold, and what to do.

    Raises:
        ConfigError: transformers cannot load it, or it is a slow tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        loaded.backend_tokenizer  # noqa: B018  # a slow tokenizer has none
        return loaded
    except Exception as error:  # the folder's content may make transformers raise any error
        raise ConfigError(
            "data.tokenizer", tokenizer, f"{rule} ({one_line(error)})", remedy
        ) from error


def _load_with_transformers(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, int | None]]:
    rule = "there is no tokenizer.json in it, and transformers cannot make one"
    remedy = (
        "Point data.tokenizer at a directory with a tokenizer.json (save_pretrained of a fast "
        "tokenizer writes one), or set data.tokenizer=byte."
    )
    loaded = _by_transformers(directory, str(directory), rule, remedy)
    return loaded.backend_tokenizer, {key: getattr(loaded, key) for key in SPECIAL_IDS}


# ---------------------------------------------------------------- chat templates


def stored_template(chat: ChatConfig, tokenizer: str) -> str:
    """Return the text of ``data.chat.template``, or of all the tokenizer's chat templates in one string.

    Args:
        tokenizer: ``byte``, or the directory or pinned Hub id of a HuggingFace tokenizer.

    Raises:
        ConfigError: there is no template, or it cannot be read.
    """
    chosen = chat.template
    if chosen is not None:
        path = Path(chosen)
        if chosen == "plain":
            path = shipped_folder("conf") / "chat_template" / "plain.jinja"
        try:
            return read_file(path.expanduser()).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "data.chat.template",
                chosen,
                f"the chat template cannot be read ({error})",
                "Name a Jinja file, or plain",
            ) from error
    folder = local_folder(tokenizer)
    others = sorted(folder.glob(f"{OTHER_TEMPLATES}/*.jinja"))
    names = [TEMPLATE, *(str(file.relative_to(folder)) for file in others)]
    texts = "".join(text_of(folder, name) for name in names if is_there(folder, name))
    for name in ("chat_template.json", "tokenizer_config.json"):
        content = "" if texts else settings_of(folder, name).get("chat_template")
        if content:
            texts = content if isinstance(content, str) else json.dumps(content)
    if not texts:
        lack = "has no chat template" if tokenizer == "byte" or folder.is_dir() else "is missing"
        raise ConfigError(
            "data.chat.template",
            None,
            f"the tokenizer {tokenizer} {lack}, and conversations need one",
            "Set data.tokenizer to that of an instruct model, data.chat.template to a Jinja file, or "
            "data.chat.template=plain for lines of 'user: ...' and 'assistant: ...'",
        )
    return texts


def load_for_templates(tokenizer: str) -> Any:
    """Return the tokenizer as ``transformers`` loads it.

    Args:
        tokenizer: ``byte``, or the directory or pinned Hub id of a HuggingFace tokenizer.

    Raises:
        ConfigError: ``transformers`` cannot load it.
    """
    rule = "transformers, which renders conversations, cannot load it"
    folder = _BYTE_FILES if tokenizer == "byte" else local_folder(tokenizer)
    return _by_transformers(folder, tokenizer, rule, "Copy the tokenizer's files again")
