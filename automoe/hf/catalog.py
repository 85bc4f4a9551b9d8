"""Catalog of a checkpoint directory: its tensors and their encoding.

Headers are read and checked once, on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from automoe.config.hub import local_folder
from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed
from automoe.hf.codes import INTEGERS, decodable, split
from automoe.hf.families.registry import family_of, read_hf_config
from automoe.hf.headers import (
    NONE,
    Contents,
    StoredTensor,
    read_headers,
    unread_adapter,
    without_collection,
)
from automoe.hf.keys import EMBEDDING, FP8_BLOCK, HEAD, Encoding, KeyMap, hf_tensors, mtp_copies
from automoe.hf.schemes import FLOAT_DTYPES
from automoe.hf.wrapper import ALONE, Names, is_of_layers, names_in, part_of, said_of, text_config
from automoe.storage.foreign import is_there


@dataclass(frozen=True)
class Catalog:
    """Checked list of the tensors that a model reads from a checkpoint directory, in file order.

    ``open_catalog`` makes it on rank 0 and broadcasts it, and ``Reader`` reads files by it.

    Attributes:
        folder: the directory.
        keys: map of tensor names: which HuggingFace tensors hold each of our parameters.
        sources: stored tensors by plain name, that is, without a vision-language wrapper's prefix.
        block: rows and columns that share a scale, if tensors are quantized.
        names: map between plain names and names in the files.
        beside: tensors outside the text model, such as a vision part, by name in the files. They
            are not read, and an export holds copies of them.
        notes: sentences for the user: which tensors are not read, and where the files overrule
            config.json.
    """

    folder: Path
    keys: KeyMap
    sources: Contents
    block: tuple[int, int] = FP8_BLOCK
    notes: tuple[str, ...] = ()
    names: Names = ALONE
    beside: Mapping[str, StoredTensor] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:  # columns are pickled in a fifth of the time
        *fields, scales, encodings = zip(*self.sources.values(), strict=True)
        of_scales = [*zip(*(each or NONE for each in scales), strict=True)]
        return {**vars(self), "sources": (list(self.sources), fields, of_scales, encodings)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, fields, of_scales, encodings = state["sources"]
        scales = (each if each.file else None for each in map(StoredTensor, *of_scales))
        tensors = map(StoredTensor, *fields, scales, encodings)
        vars(self).update(state, sources=dict(zip(names, tensors, strict=True)))

    @property
    def parts_beside(self) -> tuple[str, ...]:
        """Name prefixes, in the files, of the tensors outside the text model, such as ``model.visual.``."""
        return tuple(dict.fromkeys(map(part_of, self.beside)))


@without_collection()
def open_catalog(path: str | Path, config: ModelConfig, keys: KeyMap | None = None) -> Catalog:
    """Return the list of a checkpoint's tensors, which rank 0 reads from the headers of its files.

    The headers are checked against the model. Collective: rank 0 broadcasts the catalog.

    Args:
        config: configuration of the full model.
        keys: map of tensor names for the dense checkpoint that ``config`` upcycles; default: that
            of the model's family.

    Raises:
        CheckpointError, on every rank: a file is missing, truncated or a Git LFS pointer; keys are
            missing or unexpected; a shape or the number of experts differs; FP8 codes have no
            scales; the quantization is unknown.
    """
    from automoe.comm.agreement import Ranks  # torch

    return Ranks().lead(lambda: check_catalog(path, config, keys))


@without_collection()
def check_catalog(path: str | Path, config: ModelConfig, keys: KeyMap | None = None) -> Catalog:
    """Return the list of a checkpoint's tensors, read from the headers of its files.

    Keys, shapes and dtypes are compared with the model's. This process reads alone
    (``open_catalog`` is collective).

    Args:
        config: configuration of the full model.
        keys: map of tensor names for the dense checkpoint that ``config`` upcycles; default: that
            of the model's family.

    Raises:
        CheckpointError: a file is missing or damaged, tensors are missing, unexpected or of another
            shape or dtype, or the quantization cannot be read.
    """
    folder = local_folder(path)
    tensors = read_headers(folder)
    hf = read_hf_config(folder) if is_there(folder, "config.json") else {}
    names = names_in(folder, hf, tensors)
    keys = keys or family_of(config).keys
    text, beside = split(tensors, names, config, keys)
    sources, encoding, block = decodable(folder, hf, text)
    remedy = "Compare the model's configuration with its config.json"
    if keys.table and len(keys.layouts) == 1:  # a class of transformers, under its own names
        remedy = (
            "transformers builds parameters of this class from published tensors by more than slicing: save it with "
            "save_pretrained(save_original_format=False)"
        )
    keys = keys.fitting(sources)
    # A model may have more rows of the vocabulary than its checkpoint, and never fewer.
    rows = min(text_config(hf).get("vocab_size", config.vocab_size), config.vocab_size)
    wanted = hf_tensors(replace(config, vocab_size=rows), keys)
    notes = [*unread_adapter(folder), *_remove_unread(sources, config)]
    if new := config.vocab_size - rows:
        turns = ", tables of token ids give them experts in turn" * bool(
            config.router.num_hash_layers
        )
        notes.append(f"{new:,} new rows of the vocabulary start as the mean of its {rows:,}{turns}")
    beside, left = _without_codes(folder, beside, encoding)
    notes += [*said_of({key: stored.num_bytes for key, stored in beside.items()}), *left]
    # Files may lack the copies of embedding and head in modules for multi-token prediction.
    copies = {keys.pieces(name, ())[0].key for name in mtp_copies(config)}
    missing = [key for key in wanted if key not in sources and key not in copies]
    unexpected = [key for key in sources if key not in wanted]
    wrong = [
        f"{key} is {list(sources[key].full_shape)}, not {list(shape)}"
        for key, shape in wanted.items()
        if key in sources and sources[key].full_shape != shape
    ]
    if HEAD in unexpected:
        remedy = (
            "config.json ties the output head to the embedding, and lm_head.weight has different numbers. Set "
            "tie_word_embeddings to false there: transformers also keeps both and does not tie them"
        )
    mistyped = [
        f"{key} is {sources[key].dtype}"
        for key in wanted
        if key in sources and (sources[key].dtype == INTEGERS) != key.endswith(keys.integers)
    ]
    kinds = {
        "tensors are missing": missing,
        "are not the model's": unexpected,
        "tensors differ from the model's in shape": wrong,
        "tensors are integers where the model has fractions, or the reverse": mistyped,
    }
    if problems := [f"{len(odd)} {kind}: {listed(odd)}" for kind, odd in kinds.items() if odd]:
        raise CheckpointError(
            f"{folder} does not hold this {config.family} model of {config.num_layers} layers and "
            f"{len(wanted)} tensors: {'; '.join(problems)}. {remedy}"
        )
    if not config.tie_embeddings and HEAD in sources and hf.get("tie_word_embeddings"):
        notes.append(
            f"config.json says tie_word_embeddings=true, and the files hold a {HEAD} with other numbers than "
            f"{EMBEDDING}: the two stay separate, as in transformers"
        )
    return Catalog(folder, keys, sources, block, tuple(notes), names, beside)


def _without_codes(
    folder: Path, beside: Contents, encoding: Encoding
) -> tuple[Contents, list[str]]:
    """Return tensors outside the text model that an export can copy, and sentences on the others.

    Quantized modules for multi-token prediction are left out: an export's config.json states the
    export's own quantization, so their codes would be misread.

    Args:
        beside: tensors outside the text model, by name in the files.
        encoding: encoding of the checkpoint's quantized tensors.

    Raises:
        CheckpointError: a vision or audio part is quantized.
    """
    coded = {} if encoding == "plain" else {
        part_of(key): key for key, stored in beside.items() if stored.dtype not in FLOAT_DTYPES
    }  # fmt: skip
    for part, key in coded.items():
        if not is_of_layers(part):
            raise CheckpointError(
                f"{folder}: {key} is quantized ({beside[key].dtype}), and parts beside the text model are copied into "
                "an export, which is quantized differently or not at all. Take the checkpoint in bfloat16"
            )
    copied = {key: stored for key, stored in beside.items() if part_of(key) not in coded}
    notes = [f"not read, and not in an export, since it is quantized: {part}*" for part in coded]
    return copied, notes


def _remove_unread(sources: Contents, config: ModelConfig) -> list[str]:
    """Remove from ``sources`` the tensors that the model does not read; return notes for the user.

    These are stored rotary tables, which the model computes, and a stored copy of the embedding as
    output head, which the model ties.
    """
    computed = [key for key in sources if key.endswith(".rotary_emb.inv_freq")]
    tied = [HEAD] if config.tie_embeddings and HEAD in sources else []
    for key in computed + tied:
        del sources[key]
    return [f"not read: *.rotary_emb.inv_freq ({len(computed)}), computed, not trained"] * bool(
        computed
    ) + [f"not read: {HEAD} (1), a copy of {EMBEDDING}"] * bool(tied)
