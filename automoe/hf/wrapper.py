"""Checkpoints that wrap a text model together with vision or audio parts.

torch and transformers are imported once a function of this module needs them.

``config.json`` of a wrapper has the text model's own configuration at ``text_config``, and its
files hold the text model's tensors under a prefix. Only the text model is trained. In memory its
tensors have plain names, those in a checkpoint of the text model alone; ``Names`` maps between
plain names and names in files. Tensors of other parts are copied from a source to its export byte
for byte.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from automoe.errors import CheckpointError, listed

HFConfig = dict[str, Any]  # content of a config.json
TEXT = "text_config"
# Keys of config.json that an export drops: it states its own dtype, and has no code.
_RESTATED = ("auto_map", "torch_dtype", "quantization_config", "transformers_version")


class Names(NamedTuple):
    """Map between names of the text model's tensors in files and their plain names.

    Plain names are those in a checkpoint of the text model alone.

    Attributes:
        prefixes: pairs of a prefix in files and the plain prefix that it stands for; () if all
            names are plain.
    """

    prefixes: tuple[tuple[str, str], ...]

    def plain(self, key: str) -> str | None:
        """Return the plain name of the file's tensor ``key``: without a multimodal checkpoint's prefix.

        Returns None for a tensor outside the text model.
        """
        for stored, plain in self.prefixes:
            if key.startswith(stored):
                return plain + key.removeprefix(stored)
        return None if self.prefixes else key

    def stored(self, key: str) -> str:
        """Return the name in files of the tensor that a text model alone would call ``key``."""
        pairs = (pair for pair in self.prefixes if key.startswith(pair[1]))
        stored, plain = next(pairs, ("", ""))
        return stored + key.removeprefix(plain)


ALONE = Names(())
# The head is a sibling of the module with the text model, or both are in one module.
_WRAPPED = (
    Names((("model.language_model.", "model."), ("lm_head.", "lm_head."))),
    Names((("language_model.", ""),)),
)
# Prefix of a part of a wrapper, or of a module after the last layer.
_PART = re.compile(r"(language_model\.)?model\.(language_model\.)?(layers\.\d+\.|\w+\.)|\w+\.")
# The text model's tensors stand beside those of other parts, under transformers' or Mistral's names.
_FLAT = (
    ("model.layers.", "model.embed_tokens.", "model.norm.", "model.hc_head.", "lm_head."),
    ("layers.", "tok_embeddings.", "norm.", "lerope.", "output."),
)


def is_wrapper(hf: Mapping[str, Any]) -> bool:
    """Return True if a ``config.json`` has the text model's settings at ``text_config`` (multimodal models)."""
    return bool(hf.get(TEXT)) and isinstance(hf[TEXT], dict)


def text_config(hf: HFConfig) -> HFConfig:
    """Return the text model's configuration: ``text_config`` of a wrapper, else all of ``hf``.

    As in transformers, the wrapper decides whether head and embedding are tied.
    """
    if not is_wrapper(hf):
        return hf
    from transformers import CONFIG_MAPPING

    kind = str(hf.get("model_type"))
    known = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None
    tied = hf.get("tie_word_embeddings", getattr(known, "tie_word_embeddings", False))
    return hf[TEXT] | {"tie_word_embeddings": tied}


def quantization_in(hf: Mapping[str, Any]) -> Any:
    """Return ``quantization_config`` of a ``config.json``, from the top level or its text model."""
    stated = hf.get("quantization_config")
    if stated is None and is_wrapper(hf):
        stated = hf[TEXT].get("quantization_config")
    return stated


def wrapped_config(base: HFConfig, text: HFConfig) -> HFConfig:
    """Return the ``config.json`` of an exported multimodal checkpoint, whose text model it nests.

    Args:
        base: config.json of the checkpoint that the model was loaded from; its settings are kept
            but for those of dtype, quantization, own code and transformers' version.
        text: configuration of the exported text model; only its vocabulary's size, and whether head
            and embedding are tied, replace those of ``base``.
    """
    outer, inner = (
        {key: value for key, value in part.items() if key not in _RESTATED}
        for part in (base, base[TEXT])
    )
    stated = text_config(base)
    keys = [key for key in ("tie_word_embeddings", "vocab_size") if key in stated]
    changed = {key: text[key] for key in keys if text[key] != stated[key]}
    return outer | changed | {TEXT: inner | changed}


def names_in(folder: Path, hf: Mapping[str, Any], keys: Collection[str]) -> Names:
    """Return the two-way map (``Names``) between names in the files and those of a text model alone.

    In multimodal checkpoints the names in the files have a prefix more.

    Args:
        hf: content of config.json.
        keys: names of the tensors in the files of ``folder``.

    Raises:
        CheckpointError: config.json describes a wrapper, and the text model is not in the files.
    """
    for names in _WRAPPED:
        if any(map(str.startswith, keys, repeat(names.prefixes[0][0]))):
            return names
    if not is_wrapper(hf):
        return ALONE
    for flat in _FLAT:
        if any(key.startswith(flat[:2]) for key in keys):
            return Names(tuple((prefix, prefix) for prefix in flat))
    known = listed([*(names.prefixes[0][0] for names in _WRAPPED), *(flat[0] for flat in _FLAT)])
    raise CheckpointError(
        f"{folder}: its config.json has a {TEXT}, and its files lack the text model, the part that is trained: of "
        f"{len(keys):,} tensors ({listed(keys)}) none begins with {known}. Copy the checkpoint again"
    )


def part_of(key: str) -> str:
    """Return the prefix of a tensor's name that names its part of the checkpoint.

    It ends after the first module, or after the one below ``model.``, or after a layer's number:
    ``visual.``, ``model.visual.``, ``model.layers.61.``.
    """
    match = _PART.match(key)
    return match[0] if match else key


def is_of_layers(part: str) -> bool:
    """Return True if ``part``, a prefix of names (``part_of``), is of layers or multi-token prediction modules."""
    return re.search(r"(^|\.)mtp[._]|layers\.", part) is not None


def said_of(beside: Mapping[str, int]) -> list[str]:
    """Return one sentence, in a list: which parts (such as ``visual.``) an export copies; [] if none.

    Args:
        beside: size in bytes of each tensor outside the text model, by name in files.
    """
    sizes = defaultdict(list)
    for key, num_bytes in beside.items():
        sizes[part_of(key)].append(num_bytes)
    parts = [
        f"{part}* ({len(tensors)} tensors, {sum(tensors) / 2**20:,.1f} MiB)"
        for part, tensors in sizes.items()
    ]
    text = "not trained, and copied bit for bit into an export: "
    return [text + listed(parts)] if parts else []


def text_path(model: Any) -> str:
    """Return the module path of the text model in a multimodal ``model``; empty if ``model`` is the text model."""
    kind = type(model.config.get_text_config(decoder=True))
    named = ((name, getattr(module, "config", None)) for name, module in model.named_modules())
    return next((name for name, config in named if type(config) is kind), "")


def names_in_class(model: Any) -> Names:
    """Return the map between a transformers model's parameter names and the plain ones of its text model.

    ``stored`` of the map takes a plain name and returns the one in ``model``; ``plain`` goes back.
    They differ by a prefix if ``model`` has vision or audio parts, else they are equal.
    """
    path = text_path(model)
    if not path:
        return ALONE
    if model.get_submodule(path).get_output_embeddings() is not None:
        return Names(((f"{path}.", ""),))
    return Names(((f"{path}.", "model."), ("lm_head.", "lm_head.")))
