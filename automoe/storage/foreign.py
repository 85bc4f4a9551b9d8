"""Opening, parsing and copying of all files that may be untrusted. Needs no torch.

A name must stand for a regular file in its folder. A link may lead to another file of the folder
or, in HuggingFace's cache (where ``snapshots/REVISION`` holds only links), to ``blobs`` of the same
repository. JSON and YAML have limits of size and depth, and settings of models and tokenizers must
have the types that ``_SETTINGS`` lists. Templates and regular expressions in such files run in
``automoe.storage.guarded``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from automoe.errors import CheckpointError, retried
from automoe.storage.files import named, wrong_kind

# No config.json or index comes near: the index of a hundred thousand tensors has 10 MB.
MAX_JSON_BYTES = 100_000_000
MAX_YAML_BYTES = 1_000_000  # per configuration; those of conf/ have a few thousand
MAX_YAML_NODES = 100_000  # values per configuration, with aliases expanded
MAX_DIGITS = 400  # per number in a configuration: float64 has 309 before the point
MAX_DEPTH = 100  # levels of objects and lists
MAX_RECORD_BYTES = 1 << 28  # per line or row of training data
MAX_ID = (1 << 24) - 1  # largest token id: tables by id have as many rows


def is_there(folder: Path, name: str) -> bool:
    """Return True if ``folder`` has anything of this name, even a broken link."""
    return os.path.lexists(folder / name)


def open_inside(folder: Path, name: str) -> int:
    """Open the file ``name`` of ``folder`` for reading; never blocks, even on a FIFO.

    Returns:
        A file descriptor.

    Raises:
        CheckpointError: it is no file name, a link out of the folder, or not a regular file.
        OSError: the file does not exist or cannot be read.
    """
    try:
        real = _real_path(folder, name)
        # The kind is checked before the file is opened: opening some devices has effects.
        _check_regular(folder / name, real)
        # If the file was replaced since, a link is not followed and a FIFO does not block.
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except ValueError as error:  # a zero byte, half a surrogate pair
        raise CheckpointError(
            f"{folder}: {name!r} is not a file name ({error}). Copy the checkpoint again"
        ) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / name)) from None
    try:
        _check_regular(folder / name, handle)
    except CheckpointError:
        os.close(handle)
        raise
    return handle


def _real_path(folder: Path, name: str) -> str:
    here = os.path.realpath(folder)
    places = [here]
    above = os.path.dirname(here)
    if os.path.basename(above) == "snapshots":
        places.append(os.path.join(os.path.dirname(above), "blobs"))
    real = os.path.realpath(os.path.join(here, name))
    if not any(real.startswith(os.path.join(place, "")) for place in places):
        raise CheckpointError(
            f"{folder / name} leads out of the checkpoint's folder, to {real}. Only files inside it are read, or, in "
            "HuggingFace's cache, in blobs/ of the same repository. If you trust it, put the file itself there "
            "(cp -L)"
        )
    return real


def _check_regular(file: Path, opened: str | int) -> None:
    if (kind := wrong_kind(opened)) is not None:
        raise CheckpointError(f"{file} is {kind}, not a file. Copy the checkpoint again")


def read_bytes(folder: Path, name: str) -> bytes:
    """Return the bytes of a JSON file of ``folder``.

    Raises:
        CheckpointError: the name is a link out of the folder or not a regular file, or the file has
            more than ``MAX_JSON_BYTES`` (100 MB).
        OSError: the file cannot be read.
    """

    def read() -> bytes:
        with named(folder / name), os.fdopen(open_inside(folder, name), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{folder / name} has {size:,} bytes, and at most {MAX_JSON_BYTES:,} are read. Copy the file again"
                )
            return stream.read(MAX_JSON_BYTES)

    return retried(read)


def parse_json(raw: bytes) -> Any:
    """Parse UTF-8 JSON.

    Raises:
        ValueError: the text is invalid, repeats a key of an object, or is nested deeper than
            ``MAX_DEPTH`` (100 levels).
    """
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
            check_depth(content)
        return content
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def check_depth(value: object) -> None:
    """Raise ``ValueError`` if objects and lists are nested deeper than ``MAX_DEPTH`` (100 levels)."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise _too_deep()


def compose_yaml(raw: bytes) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """Parse YAML into nodes and check their sizes; return PyYAML's (loader, root node).

    The node is None for an empty document.

    Raises:
        ValueError: too many bytes, values (with aliases expanded), levels, or digits in a number.
        yaml.YAMLError: the text is not YAML.
    """
    if len(raw) > MAX_YAML_BYTES:
        raise ValueError(f"it has {len(raw):,} bytes, and at most {MAX_YAML_BYTES:,} are read")
    loader = yaml.SafeLoader(raw)
    try:
        node = loader.get_single_node()
        if node is not None:
            count, levels = _written_out(node, {}, 0, "")
            if count > MAX_YAML_NODES:
                rule = f"{count:,} values once its aliases are expanded"
                raise ValueError(f"{rule}, and at most {MAX_YAML_NODES:,} are read")
            if levels > MAX_DEPTH:
                raise RecursionError
    except RecursionError:
        raise _too_deep() from None
    return loader, node


def _written_out(
    node: yaml.Node, known: dict[int, tuple[int, int]], depth: int, key: str
) -> tuple[int, int]:
    """Return (number of values in ``node`` with aliases expanded, its levels of nesting).

    Args:
        known: results by ``id`` of a node.
        depth: levels above ``node``.
        key: dotted key of ``node``, for an error.

    Raises:
        ValueError: a number has too many digits.
        RecursionError: the nesting is deeper than ``MAX_DEPTH``, or a node contains itself.
    """
    if depth > MAX_DEPTH:  # also for an alias of a node that contains it
        raise RecursionError
    if id(node) not in known:
        inner: list[tuple[yaml.Node, str]] = []
        if isinstance(node, yaml.MappingNode):
            inner = [
                (part, f"{key}.{k.value}".lstrip(".")) for k, v in node.value for part in (k, v)
            ]
        elif isinstance(node, yaml.SequenceNode):
            inner = [(part, key) for part in node.value]
        elif node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            raise ValueError(
                f"{key} is a number of {len(node.value):,} digits (at most {MAX_DIGITS})"
            )
        sizes = [_written_out(part, known, depth + 1, name) for part, name in inner]
        known[id(node)] = 1 + sum(n for n, _ in sizes), 1 + max((n for _, n in sizes), default=0)
    return known[id(node)]


def parse_yaml(raw: bytes) -> Any:
    """Parse YAML into plain values.

    Raises ``ValueError`` if it is too large or too deep, ``yaml.YAMLError`` if it is not YAML.
    """
    loader, node = compose_yaml(raw)
    return None if node is None else loader.construct_document(node)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (key, value) pairs of a JSON object as a dictionary, for ``json.loads``.

    Raises ``ValueError`` if a key is repeated.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        names = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {brief(twice)} occurs twice in it")
    return content


def brief(value: object) -> str:
    """Return the ``repr`` of a value from a file, cut after 80 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy the file ``name`` of ``folder`` to ``target``, over any older copy.

    Raises ``CheckpointError`` for a link out of the folder, or if it is no regular file.
    """
    with os.fdopen(open_inside(folder, name), "rb") as source:
        with named(target, os.fstat(source.fileno()).st_size), open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


# Settings of models and tokenizers
# ----------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_id(value: Any) -> bool:
    return type(value) is int and -1 <= value <= MAX_ID


def _is_token(value: Any) -> bool:
    return _is_text(value.get("content") if isinstance(value, dict) else value)


def _is_template(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(value.get(key)) for key in ("name", "template"))


def _several(is_one: Callable[[Any], bool], kinds: Any = list) -> Callable[[Any], bool]:
    """Return a test that accepts a value that passes ``is_one``, or a collection of such values.

    Args:
        is_one: test of one value.
        kinds: type, or tuple of types, that counts as a collection; a dictionary's values are
            tested.
    """

    def all_are(value: Any) -> bool:
        if not isinstance(value, kinds):
            return is_one(value)
        return all(map(is_one, value.values() if isinstance(value, dict) else value))

    return all_are


# Keys of JSON settings with one meaning in every file -> (description of a valid value, its test).
# Null counts as no value.
_SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    key: (words, test)
    for words, test, keys in (
        (
            "text, or an object with its content",
            _is_token,
            "bos_token eos_token unk_token sep_token pad_token cls_token mask_token",
        ),
        (
            "a collection of texts, or of objects with their content",
            lambda value: (
                isinstance(value, (list, dict)) and _several(_is_token, (list, dict))(value)
            ),
            "additional_special_tokens extra_special_tokens added_tokens_decoder",
        ),
        (
            "text, or a list of objects with name and template",
            lambda value: (
                _is_text(value) or isinstance(value, list) and _several(_is_template)(value)
            ),
            "chat_template",
        ),
        (f"a token's id, at most {MAX_ID:,}", _is_id, "bos_token_id pad_token_id"),
        (
            f"a token's id, at most {MAX_ID:,}, or a list of them",
            _several(_is_id),
            "eos_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
            "begin_suppress_tokens",
        ),
        (
            "a finite number",
            lambda value: type(value) in (int, float) and abs(value) < 1e31 and isfinite(value),
            "model_max_length temperature top_p top_k min_p typical_p epsilon_cutoff eta_cutoff "
            "repetition_penalty length_penalty no_repeat_ngram_size max_length max_new_tokens "
            "min_length min_new_tokens num_beams num_return_sequences max_time",
        ),
        (
            "true or false",
            lambda value: isinstance(value, bool),
            "do_sample add_bos_token add_eos_token clean_up_tokenization_spaces",
        ),
        ("text", _is_text, "model_type tokenizer_class quant_method fmt"),
        (
            "the name of a dtype",
            lambda value: isinstance(value, str) and ("float" in value or value == "auto"),
            "dtype torch_dtype",
        ),
        (
            "text, or a list of it",
            _several(_is_text),
            "architectures model_input_names stop_strings",
        ),
        (
            "an object",
            lambda value: isinstance(value, dict),
            "quantization_config watermarking_config",
        ),
        # Any other name may be that of code on the Hub, which transformers would fetch and run.
        (
            "eager, sdpa, flex_attention, batched_mm or grouped_mm",
            lambda value: value in ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"),
            "attn_implementation _attn_implementation experts_implementation "
            "_experts_implementation _attn_implementation_internal "
            "_experts_implementation_internal",
        ),
    )
    for key in keys.split()
}


def parse_settings(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object of a ``config.json`` or the like, and check the types of known keys.

    Raises:
        ValueError: the JSON is invalid or no object, or the type of a value is wrong; the message
            then names the key.
    """
    content = parse_json(raw)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    _check_settings(content, "")
    return content


def _check_settings(content: dict[str, Any], prefix: str) -> None:
    for key, value in content.items():
        words, test = _SETTINGS.get(key, ("", None))
        if test is not None and value is not None and not test(value):
            raise ValueError(f"{prefix}{key}={brief(value)}, which must be {words}")
        if value != value:
            raise ValueError(f"{prefix}{key} is NaN")
        if isinstance(value, dict):
            _check_settings(value, f"{prefix}{key}.")


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file such as ``config.json``; {} if the file does not exist.

    Raises:
        CheckpointError: the name is a link out of the folder, not a regular file, or larger than
            100 MB.
        OSError: the file cannot be read.
        ValueError: the JSON is invalid, or a known key has a value of the wrong type.
    """
    return parse_settings(read_bytes(folder, name)) if is_there(folder, name) else {}
