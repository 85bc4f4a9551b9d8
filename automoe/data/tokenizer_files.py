"""Checks of a tokenizer's files, which may be untrusted, before they are used.

Importing this module does not load tokenizers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from automoe.errors import ConfigError
from automoe.storage.foreign import is_there, read_bytes, read_settings
from automoe.storage.guarded import doing, guarded

_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
)
# Parts of a tokenizer.json that may have expressions, and a text whose runs of one character make
# bad expressions backtrack.
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_PROBE = "".join(f"{char * 48}!" for char in "aA0_ \n.\u00e9\u4e2d")


def unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "data.tokenizer",
        str(path.parent),
        f"{path} cannot be read: {why}",
        "Copy the tokenizer again; a Git LFS pointer in its place needs `git lfs pull`.",
    )


def settings_of(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in file ``name`` of a tokenizer's directory; {} if it is missing.

    Raises:
        ConfigError, CheckpointError: the file cannot be read, or a value has a wrong type.
    """
    try:
        return read_settings(directory, name)
    except (OSError, ValueError) as error:
        raise unreadable(directory / name, str(error)) from error


def text_of(directory: Path, name: str) -> str:
    try:
        return read_bytes(directory, name).decode("utf-8")
    except (OSError, ValueError) as error:
        raise unreadable(directory / name, str(error)) from error


def check_files(directory: Path) -> None:
    """Check a tokenizer's JSON files, and run each stage of tokenizer.json on a test text.

    The stages run in a child process, and only if tokenizer.json has regular expressions or a
    precompiled character map, since only these can run forever or crash.

    Raises:
        ConfigError, CheckpointError: a file cannot be read, or a value has a wrong type.
        DataError: a stage takes too long or too much memory, or ends the process.
    """
    for name in _SETTINGS:
        settings_of(directory, name)
    path = directory / "tokenizer.json"
    if is_there(directory, path.name):
        text = text_of(directory, path.name)
        if "Regex" in text or "precompiled_charsmap" in text:
            guarded(str(path), lambda: _try_parts(path, text))


def _try_parts(path: Path, text: str) -> None:
    from tokenizers import Tokenizer as Backend

    try:
        spec = json.loads(text)
        nothing = dict.fromkeys((*_PARTS, "post_processor"))
        nothing |= {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        for part in _PARTS:
            doing(named_parts(path, nothing | {part: spec.get(part)}))
            backend = Backend.from_str(json.dumps(nothing | {part: spec.get(part)}))
            if backend.normalizer:
                backend.normalizer.normalize_str(_PROBE)
            if backend.pre_tokenizer:
                backend.pre_tokenizer.pre_tokenize_str(_PROBE)
            if backend.decoder:
                backend.decoder.decode(_PROBE.split("!"))
    # tokenizers raises a bare Exception for a malformed file, and panics are no Exception.
    except BaseException as error:
        raise unreadable(path, str(error)) from error


def named_parts(path: Path, spec: dict[str, Any]) -> str:
    """Return text for an error: path, and the tokenizer stages that use regular expressions.

    If no stage does, the text names all of them.

    Args:
        spec: content of the tokenizer.json at ``path``.
    """
    there = [part for part in _PARTS if spec[part]]
    parts = [part for part in there if "Regex" in json.dumps(spec[part])] or there
    return f"{path}: {' and '.join(parts) or 'model'}"


def byte_lengths(spec: dict[str, Any], vocab: dict[str, int], vocab_size: int) -> np.ndarray:
    """Return the number of UTF-8 bytes that each id stands for, [vocab_size] int64.

    It is 0 for special tokens and for ids without a token. The decoder in ``spec`` tells how tokens
    spell bytes.

    Args:
        spec: content of a tokenizer.json.
        vocab: token -> id.
    """
    decoder = json.dumps(spec["decoder"])
    added = {token["id"]: token for token in spec["added_tokens"]}
    lengths = np.zeros(vocab_size, dtype=np.int64)
    for piece, index in vocab.items():
        if index in added:
            lengths[index] = 0 if added[index]["special"] else len(piece.encode())
        elif '"ByteLevel"' in decoder:
            lengths[index] = len(piece)  # GPT-2's alphabet has one character for each byte.
        elif '"ByteFallback"' in decoder and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            lengths[index] = 1
        elif '"WordPiece"' in decoder:
            # A piece continues a word after "##", and follows a space otherwise.
            lengths[index] = len(piece.encode()) + (-2 if piece.startswith("##") else 1)
        else:
            # SentencePiece writes a space as U+2581.
            lengths[index] = len(piece.replace("\u2581", " ").encode())
    return lengths
