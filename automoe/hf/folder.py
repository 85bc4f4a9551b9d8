"""Atomic creation of a checkpoint directory, and its files other than weights.

A directory is written under a temporary name and renamed at the end.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automoe.config.data_schema import NO_TOKENIZER
from automoe.config.hub import local_folder
from automoe.config.schema import ModelConfig
from automoe.data.tokenizer import (
    OTHER_TEMPLATES,
    SPECIAL_IDS,
    ByteTokenizer,
    load_tokenizer,
    tokenizer_beside,
)
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.families.registry import family_of, read_hf_config
from automoe.hf.headers import COPY_AGAIN
from automoe.hf.keys import Encoding, KeyMap, quantization_config
from automoe.hf.wrapper import TEXT, HFConfig, is_of_layers, is_wrapper, text_config, wrapped_config
from automoe.storage.files import explained, write_text
from automoe.storage.folder import flush_folder, name_folder, remove_folder, restore_folder
from automoe.storage.foreign import (
    copy_file,
    open_inside,
    parse_json,
    parse_settings,
    read_bytes,
    read_settings,
)
from automoe.storage.lock_file import take_lock

if TYPE_CHECKING:
    import torch

    from automoe.comm.agreement import Ranks
    from automoe.data.chat_template import ChatTemplate
    from automoe.hf.catalog import Catalog

# Patterns; ``tokenization_*.py`` are Kimi's and Moonlight's own, which tokenizer_config.json names.
_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt vocab.txt "
    "tokenizer.model spiece.model tiktoken.model tokenization_*.py chat_template.jinja chat_template.json "
    f"{OTHER_TEMPLATES}/*.jinja"
).split()
_PROCESSOR_FILES = ("*processor_config.json",)  # of images, videos and sound
GENERATION = "generation_config.json"
_IDS = re.compile("(_token_id|_ids|suppress_tokens)$")  # keys of token ids among settings
_MTP = ("num_nextn_predict_layers",)  # key of config.json that counts copied, untrained modules
_QWEN_MTP = "mtp_num_hidden_layers"  # the same of Qwen3.5, which the files keep otherwise

SYNTHETIC = "# Trained on synthetic ids\n\nRandom numbers (data=benchmark), no text: these weights know nothing.\n"


def check_target(path: Path, overwrite: bool) -> None:
    """Raise ``CheckpointError`` if an export may not be written to ``path``; write nothing.

    Refused are a path that exists, unless ``overwrite`` is set, and one that is not UTF-8.

    Args:
        overwrite: True to allow an empty folder, a checkpoint or an adapter at ``path``, which the
            export replaces; anything else there is refused.
    """
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(
            f"{path} exists. Name another directory, or overwrite it (--overwrite)"
        )
    if os.fsencode(path).decode(errors="ignore") != str(path):
        raise CheckpointError(
            f"{path} is not UTF-8, and safetensors opens no such path. Name another directory"
        )
    ours = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if os.path.lexists(path) and not ours and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(
            f"{path} is not a checkpoint directory, so it is not replaced. Name another one"
        )


def check_conversion(
    config: ModelConfig, path: Path, *, encoding: Encoding, layout: str, overwrite: bool
) -> KeyMap:
    """Check the options of a conversion; return the map of tensor names in the files to write.

    Args:
        config: configuration of the model to write.
        path: directory to write.
        encoding: ``plain``, or the quantization to write: ``fp8``, ``mxfp4`` or ``int4``.
        layout: layout of experts: ``published``, or ``fused`` as in transformers 5.
        overwrite: True to allow a checkpoint at ``path``, which is replaced.

    Raises:
        ConfigError: the layout is unknown, or ``encoding`` is not one of the family's or is
            combined with fused experts.
        CheckpointError: ``path`` exists and may not be replaced, or a settings or tokenizer file to
            copy is damaged.
    """
    check_target(path, overwrite)
    if layout not in ("published", "fused"):
        raise ConfigError("--layout", layout, "must be published or fused", "Use published")
    if encoding != "plain" and layout == "fused":
        raise ConfigError(
            f"--{encoding}",
            "with --layout fused",
            "quantized experts are stored as they are published",
            "Leave one of them out",
        )
    keys = family_of(config).keys
    copied_files(config, None)
    if quantization_config(config, keys, encoding):
        return keys.per_expert
    return keys.in_memory if layout == "fused" else keys


@contextmanager
def new_folder(path: Path, overwrite: bool, ranks: Ranks) -> Iterator[Path]:
    """Yield an empty working folder and rename it to ``path`` at the end. Collective.

    Any exception, raised here or in the body, leaves nothing new under ``path``.

    Args:
        overwrite: True to replace an empty folder, a checkpoint or an adapter at ``path``.
        ranks: the ranks that export together; the first of them makes and renames the folder.

    Raises:
        CheckpointError: ``path`` may not be written, another export is being written to it, or the
            disk is full.
    """
    folder = path.with_name(f".{path.name}.tmp")
    lock = path.with_name(f".{path.name}.lock")

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = take_lock(lock)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{path} is being written by another export, process {error.strerror}. Wait for it, or name another one"
            ) from None
        held.callback(os.close, handle)
        held.callback(lock.unlink, missing_ok=True)
        restore_folder(path)
        check_target(path, overwrite)
        remove_folder(folder)
        folder.mkdir()
        held.callback(remove_folder, folder)

    def commit() -> None:
        flush_folder(folder)
        check_target(path, overwrite)  # the target may have changed since the beginning
        name_folder(folder, path)

    with explained(path, "Make room or name another directory"), ExitStack() as held:
        ranks.lead(begin, again=False)
        yield folder
        ranks.lead(commit, again=False)


def write_settings(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    tokenizer: str | None,
    quantization: HFConfig | None = None,
    chat: ChatTemplate | None = None,
    source: Catalog | None = None,
) -> None:
    """Write config.json, generation_config.json and the tokenizer's and processor's files.

    Args:
        config: configuration of the exported model. Settings and files that it does not state come
            from the checkpoint at its ``hf_path``.
        dtype: dtype of the parameters.
        tokenizer: tokenizer of the training text: ``byte``, a directory or ``none`` (no text);
            None: that of ``config.hf_path``.
        quantization: the ``quantization_config`` that config.json gets.
        chat: chat template of the training; it is written too, and the token that ends an answer is
            added to the ``eos_token_id`` of generation.
        source: checkpoint whose tensors outside the text model (a vision part) were copied, or
            None. If its config.json wraps a text model's settings, so does the written one.
    """
    origin = local_folder(config.hf_path) if config.hf_path is not None else None
    base = origin and read_hf_config(origin)
    hf = text = family_of(config).write_config(config, base and text_config(base))
    if source is not None and base is not None and is_wrapper(base):
        hf = wrapped_config(base, text)
        text = hf[TEXT]
    if source is not None and any(map(is_of_layers, source.parts_beside)):
        text |= {key: value for key, value in text_config(base or {}).items() if key in _MTP}
    elif text.get(_QWEN_MTP):  # engines that count on the modules find none
        text[_QWEN_MTP] = 0
    fit = None
    if base is None or not _is_own(tokenizer, origin):
        fit = _fitting(tokenizer, origin)
        stated = [key for key in SPECIAL_IDS if key in hf]
        text |= {key: fit(text)[key] for key in SPECIAL_IDS}
        hf |= {key: fit(hf)[key] for key in stated}
    hf["dtype"] = text["dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        hf["quantization_config"] = (
            quantization if source is None else _renamed(quantization, source)
        )
    _write_json(folder / "config.json", hf)
    files = copied_files(config, tokenizer)
    for where, name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        copy_file(where, name, folder / name)
    ids = {key: text.get(key) for key in SPECIAL_IDS}
    if GENERATION not in [name for _, name in files]:  # an earlier try may have left half of one
        _write_json(folder / GENERATION, {"_from_model_config": True} | ids)
    elif fit is not None:
        _write_json(folder / GENERATION, fit(ids | read_settings(folder, GENERATION)))
    if tokenizer == "byte":
        for name, content in ByteTokenizer.files().items():
            write_text(folder / name, content)
    if tokenizer == NO_TOKENIZER:
        write_text(folder / "README.md", SYNTHETIC)
    if chat is not None:
        for name, template in chat.exported().items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_text(folder / name, template)
        settings = read_settings(folder, GENERATION)
        # With a base model's ids alone, generation would not stop at the end of an answer.
        stops = _with_stop(settings.get("eos_token_id"), chat.stop_id())
        _write_json(folder / GENERATION, settings | {"eos_token_id": stops})


def copied_files(config: ModelConfig, tokenizer: str | None) -> list[tuple[Path, str]]:
    """List (folder, name) of the files that an export copies.

    These are generation_config.json and the files of tokenizer and processor.

    Args:
        tokenizer: tokenizer of the training text: ``byte``, a directory or ``none`` (no text);
            None: that of ``config.hf_path``.

    Raises:
        ConfigError: the tokenizer's directory does not exist.
        CheckpointError: a file is a link out of its folder, is not a regular file, cannot be read,
            or is called JSON but holds something else.
    """
    source = local_folder(config.hf_path) if config.hf_path is not None else None
    patterns = {} if source is None else {source: (*_PROCESSOR_FILES, GENERATION)}
    if _is_own(tokenizer, source):
        patterns = {source: (*_TOKENIZER_FILES, *_PROCESSOR_FILES, GENERATION)}
    elif tokenizer not in ("byte", NO_TOKENIZER):
        patterns[local_folder(str(tokenizer))] = _TOKENIZER_FILES
    files = []
    for place, kinds in patterns.items():
        if place is None:
            continue
        if not place.is_dir():
            raise ConfigError(
                "tokenizer",
                place,
                "there is no such directory",
                "Name one with a tokenizer's files",
            )
        names = sorted(os.listdir(place))  # includes broken links, which are refused below
        if (place / OTHER_TEMPLATES).is_dir():
            names += [
                f"{OTHER_TEMPLATES}/{name}" for name in sorted(os.listdir(place / OTHER_TEMPLATES))
            ]
        files += [
            (place, name) for name in names if any(fnmatch(name, pattern) for pattern in kinds)
        ]
    for folder, name in files:
        # The two largest files hold no settings, and reading a run's tokenizer checks them.
        large = name in ("tokenizer.json", "vocab.json")
        with explained(folder / name, COPY_AGAIN):
            os.close(open_inside(folder, name))
            if name.endswith(".json") and not (large and tokenizer):
                try:
                    (parse_json if large else parse_settings)(read_bytes(folder, name))
                except ValueError as error:
                    raise CheckpointError(
                        f"{folder / name}: {error}, and an export copies this file. Copy it again"
                    ) from None
    return files


def _renamed(quantization: HFConfig, source: Catalog) -> HFConfig:
    """Return ``quantization_config`` for files that are named like those of ``source``.

    In its list of modules that are not quantized, modules of the text model get their names in
    ``source``'s files, where they may have a prefix, and copied parts (a vision part) are added.
    """
    key = "ignore" if "ignore" in quantization else "modules_to_not_convert"
    plain = [
        name if name.startswith("re:") else source.names.stored(f"{name}.")[:-1]
        for name in quantization[key]
    ]
    beside = [part.removesuffix(".") for part in source.parts_beside]
    if key == "ignore":  # a plain name in compressed-tensors would not cover submodules
        beside = [f"re:{part}.*" for part in beside]
    return quantization | {key: plain + beside}


def _is_own(tokenizer: str | None, source: Path | None) -> bool:
    """Return True if the export keeps the tokenizer of the checkpoint ``source``.

    If so, the export also keeps token ids and generation settings of ``source``.

    Args:
        tokenizer: folder of the tokenizer; None stands for that of ``source``.
        source: folder of the checkpoint that the model came from, if any.
    """
    return tokenizer is None or (
        source is not None and local_folder(tokenizer).absolute() == source.absolute()
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value][: value is not None]


def _with_stop(known: Any, stop_id: int | None) -> Any:
    """Return ``eos_token_id`` with ``stop_id`` added: one id, or a list of several.

    Args:
        known: ``eos_token_id`` so far: an id, a list or None.
        stop_id: id to put first; None adds nothing.
    """
    if stop_id is None or stop_id in _listed(known):
        return known
    return [stop_id, *_listed(known)] if _listed(known) else stop_id


def _write_json(file: Path, content: HFConfig) -> None:
    write_text(file, json.dumps(content, indent=2) + "\n")


def _fitting(tokenizer: str | None, base: Path | None) -> Callable[[HFConfig], HFConfig]:
    """Return a function that adapts a checkpoint's settings to the token ids of a tokenizer.

    The function takes config.json or generation_config.json, and replaces their token ids by those
    of the tokenizer. An id that the tokenizer lacks becomes None, because transformers fills an
    absent key with the family's published id. Other ids that end generation stay if the tokenizer
    has the same tokens under these ids as that of ``base``.

    Args:
        tokenizer: tokenizer of the training; None or ``none``: there are no ids.
        base: checkpoint that the settings come from.
    """
    ids = dict.fromkeys(SPECIAL_IDS)
    unchanged = ids.__contains__  # no id is
    if tokenizer is not None and tokenizer != NO_TOKENIZER:
        loaded = load_tokenizer(tokenizer)
        ids |= loaded.special_ids
        unchanged = partial(loaded.shares, other=tokenizer_beside(base))

    def fit(settings: HFConfig) -> HFConfig:
        merged = {"eos_token_id": None} | settings
        for key, value in merged.items():
            if _IDS.search(key):
                stops = [token for token in _listed(value) if all(map(unchanged, _listed(token)))]
                merged[key] = (
                    stops if stops and isinstance(value, list) else next(iter(stops), None)
                )
        return (
            merged | ids | {"eos_token_id": _with_stop(merged["eos_token_id"], ids["eos_token_id"])}
        )

    return fit
