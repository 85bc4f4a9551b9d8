"""Catalog of a checkpoint directory: its tensors and their encoding.

Headers are read and checked once, on one rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from automoe.config.hub import local_folder
from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed
from automoe.hf.families.registry import family_of, read_hf_config
from automoe.hf.headers import (
    EMBEDDING,
    ENDS,
    HEAD,
    SHAPE,
    StoredTensor,
    read_headers,
    unread_adapter,
    without_collection,
)
from automoe.hf.keys import (
    FP8_BLOCK,
    GROUP,
    INT4,
    Encoding,
    KeyMap,
    hf_pieces,
    hf_tensors,
    mtp_copies,
)
from automoe.hf.writers import BASE
from automoe.model.wrapper import ALONE, Names, names_in, part_of, quantization_in, said_of
from automoe.storage.foreign import brief, is_there, open_inside

FLOAT_DTYPES = {"F64", "F32", "BF16", "F16"}


@dataclass(frozen=True)
class Catalog:
    """Tensors that a model reads from a checkpoint directory, in file order.

    Attributes:
        folder: the directory.
        keys: key map of the directory's layout.
        sources: stored tensors by plain name (``automoe.model.wrapper``).
        block: rows and columns that share a scale in block-FP8.
        names: map between plain names and names in the files.
        beside: tensors outside the model, such as a vision part, by name in the files. They are not
            read, and an export holds copies of them.
        notes: sentences for the user: which tensors are not read, and where the files overrule
            config.json.
    """

    folder: Path
    keys: KeyMap
    sources: dict[str, StoredTensor]
    block: tuple[int, int] = FP8_BLOCK
    notes: tuple[str, ...] = ()
    names: Names = ALONE
    beside: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def parts_beside(self) -> tuple[str, ...]:
        """Prefixes of the names in ``beside``."""
        return tuple(dict.fromkeys(map(part_of, self.beside)))


@without_collection()
def open_catalog(path: str | Path, config: ModelConfig, keys: KeyMap | None = None) -> Catalog:
    """Read all headers on rank 0, check them against the model, and broadcast the catalog.

    Collective.

    Args:
        config: configuration of the full model.
        keys: key map of the dense checkpoint that ``config`` upcycles; default: the key map of the
            model's family.

    Raises:
        CheckpointError: on every rank alike: a file is missing, truncated or a Git LFS pointer;
            keys are missing or unexpected; a shape or the number of experts differs; FP8 codes have
            no scales; the quantization is unknown.
    """
    from automoe.parallel.agreement import Ranks  # torch

    return Ranks().lead(lambda: check_catalog(path, config, keys))


@without_collection()
def check_catalog(path: str | Path, config: ModelConfig, keys: KeyMap | None = None) -> Catalog:
    """Do the work of ``open_catalog`` without collectives: parse all headers, and compare keys,
    shapes and dtypes with the model."""
    folder = local_folder(path)
    tensors = read_headers(folder)
    encoding, block = quantization_of(folder)
    names = names_in(folder, _stated(folder), tensors)
    keys = keys or family_of(config).keys
    text, beside = split(tensors, names, config, keys)
    sources = _pair_scales(folder, text, encoding)
    remedy = "Compare the model's configuration with its config.json"
    if keys.table and len(keys.layouts) == 1:  # a class of transformers, under its own names
        remedy = (
            "transformers builds parameters of this class from published tensors by more than slicing: save it with "
            "save_pretrained(save_original_format=False)"
        )
    keys = keys.fitting(sources)
    wanted = hf_tensors(config, keys)
    notes = [*unread_adapter(folder), *_remove_unread(sources, config)]
    beside, left = _without_codes(folder, beside, encoding)
    notes += [*said_of({key: one.num_bytes for key, one in beside.items()}), *left]
    # Files may lack the copies of embedding and head in modules for multi-token prediction.
    copies = {hf_pieces(name, (), keys)[0].key for name in mtp_copies(config)}
    missing = [key for key in wanted if key not in sources and key not in copies]
    unexpected = [key for key in sources if key not in wanted]
    wrong = [
        key for key in wanted if key in sources and sources[key].full_shape != tuple(wanted[key])
    ]
    if HEAD in unexpected:
        remedy = (
            "config.json ties the output head to the embedding, and lm_head.weight has different numbers. Set "
            "tie_word_embeddings to false there: transformers also keeps both and does not tie them"
        )
    if missing or unexpected or wrong:
        _check_experts(folder, sources, config, keys)
    kinds = ("tensors are missing", missing), ("are not the model's", unexpected)
    if found := [f"{len(odd)} {kind}: {listed(odd)}" for kind, odd in kinds if odd]:
        raise CheckpointError(
            f"{folder} does not hold this {config.family} model of {config.num_layers} layers and "
            f"{len(wanted)} tensors: {'; '.join(found)}. {remedy}"
        )
    if wrong:
        shapes = [
            f"{key} is {list(sources[key].full_shape)}, not {list(wanted[key])}"
            for key in wrong[:4]
        ]
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors differ from the model's in shape: {'; '.join(shapes)}. "
            "Compare the model's configuration with its config.json"
        )
    _check_encodings(folder, sources, encoding, block)
    if not config.tie_embeddings and HEAD in sources and _stated(folder).get("tie_word_embeddings"):
        notes.append(
            f"config.json says tie_word_embeddings=true, and the files hold a {HEAD} with other numbers than "
            f"{EMBEDDING}: the two stay separate, as in transformers"
        )
    return Catalog(folder, keys, sources, block, tuple(notes), names, beside)


def check_codes(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Refuse a folder whose codes nobody can decode: every reader asks this before it reads weights.

    Args:
        tensors: headers of the model's tensors, by plain name if automoe will read them.

    Raises:
        CheckpointError: the quantization is unknown, or codes have no scales, or ones of a wrong
            shape or dtype.
    """
    encoding, block = quantization_of(folder)
    _check_encodings(folder, _pair_scales(folder, tensors, encoding), encoding, block)


def _stated(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, or {} if the file does not exist."""
    return read_hf_config(folder) if is_there(folder, "config.json") else {}


def quantization_of(folder: Path) -> tuple[Encoding, tuple[int, int]]:
    """Return encoding and block size from config.json's ``quantization_config``."""
    stated = quantization_in(_stated(folder))
    if stated is None:
        return "plain", FP8_BLOCK
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if method == "mxfp4":
        return "mxfp4", FP8_BLOCK
    if method == "compressed-tensors" and isinstance(stated, dict):
        _check_int4(folder, stated)
        return "int4", FP8_BLOCK
    if method != "fp8" or not isinstance(stated, dict):
        raise CheckpointError(
            f"{folder}/config.json: quantization_config has quant_method={method}, and only fp8, mxfp4 and "
            f"compressed-tensors (INT4) can be read. {BASE}"
        )
    block: Any = stated.get("weight_block_size")
    sizes = block if isinstance(block, list) and len(block) == 2 else [0, 0]
    known = stated.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
    if not (known and all(type(size) is int and 0 < size < 1 << 31 for size in sizes)):
        raise CheckpointError(
            f"{folder}/config.json: quantization_config has fmt={stated.get('fmt')} and "
            f"weight_block_size={block}, and FP8 is read only as e4m3 with scales per "
            f"block, such as [128, 128]. {BASE}"
        )
    return "fp8", (sizes[0], sizes[1])


def _check_int4(folder: Path, stated: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` unless compressed-tensors states Kimi's INT4 in groups."""
    groups = stated.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    kinds = [one if isinstance(one, dict) else {} for one in schemes] or [{}]
    asked = {"format": "pack-quantized", "config_groups": "one"}
    found: dict[str, Any] = {
        "format": kinds[0].get("format") or stated.get("format"),
        "config_groups": "one" if len(schemes) == 1 else len(schemes),
    }
    for key in ("input_activations", "output_activations"):
        asked[key], found[key] = None, kinds[0].get(key)
    weights = kinds[0].get("weights")
    asked |= INT4 | {"actorder": None}
    found |= {
        key: weights.get(key) if isinstance(weights, dict) else None
        for key in asked.keys() - found.keys()
    }
    for key in ("transform_config", "sparsity_config"):
        asked[key], found[key] = "empty", stated.get(key) or "empty"
    if wrong := [
        f"{key}={found[key]}, not {value}" for key, value in asked.items() if found[key] != value
    ]:
        raise CheckpointError(
            f"{folder}/config.json: quantization_config of compressed-tensors has {listed(wrong)}, and only "
            f"INT4 with one scale per {GROUP} numbers of a row is read here. {BASE}"
        )


def _pair_scales(
    folder: Path, tensors: dict[str, StoredTensor], encoding: Encoding
) -> dict[str, StoredTensor]:
    """Attach scales to their codes, under the name of the unquantized tensor."""
    if encoding == "plain":
        return tensors
    codes_end, scales_end, least_dims = ENDS[encoding]
    scales_of = {}  # name of the codes -> scales
    paired = set()
    for name, scales in tensors.items():
        if name.endswith(scales_end) and name not in scales_of:
            codes = name[: -len(scales_end)] + codes_end
            if codes in tensors and codes not in paired and len(tensors[codes].shape) >= least_dims:
                scales_of[codes] = scales
                paired.add(name)
    sources = {}
    for name, data in tensors.items():
        if name in scales_of:
            base = name[: len(name) - len(codes_end)]
            if codes_end and base in tensors:
                raise CheckpointError(
                    f"{folder}: {brief(base)} is in {tensors[base].file}, and also as {brief(name)} with scales in "
                    f"{data.file}; nothing says which one counts. Copy the checkpoint again"
                )
            sources[base] = data._replace(scales=scales_of[name], encoding=encoding)
        elif name not in paired:
            sources[name] = data
    return _check_shapes(folder, sources) if encoding == "int4" else sources


def _check_shapes(folder: Path, sources: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Check the shapes that INT4 stores beside codes; return ``sources`` without these shapes."""
    kept = dict(sources)
    opened = {}
    try:
        for name, codes in sources.items():
            stated = kept.pop(name + SHAPE, None) if codes.encoding == "int4" else None
            if stated is None:
                continue
            if stated.file not in opened:
                opened[stated.file] = open_inside(folder, stated.file)
            size = 4 if stated.dtype == "I32" else 8
            raw = os.pread(opened[stated.file], stated.num_bytes, stated.start)
            sizes = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
            if sizes != list(codes.full_shape):
                raise CheckpointError(
                    f"{folder}: {name}{SHAPE} says {sizes}, and {name}_packed holds {list(codes.full_shape)}. "
                    "Copy the checkpoint again"
                )
    finally:
        for handle in opened.values():
            os.close(handle)
    return kept


def _check_encodings(
    folder: Path, sources: dict[str, StoredTensor], encoding: Encoding, block: tuple[int, int]
) -> None:
    """Raise ``CheckpointError`` for an unreadable dtype or scales that do not fit the blocks."""
    unscaled = [
        key for key, s in sources.items() if s.encoding == "plain" and s.dtype not in FLOAT_DTYPES
    ]
    if unscaled:
        what = f"{len(unscaled)} tensors are quantized ({sources[unscaled[0]].dtype}): {listed(unscaled)}"
        if encoding == "plain":
            raise CheckpointError(
                f"{folder}: {what}, and config.json has no quantization_config that says how. Copy the "
                "checkpoint's own config.json, or convert it to bfloat16"
            )
        ends = ENDS[encoding]
        missing = unscaled[0].removesuffix(ends[0]) + ends[1]
        raise CheckpointError(
            f"{folder}: {what}, and their scales are missing: {missing} is "
            f"{'for codes of more dims' if missing in sources else 'in no file'}. Without "
            "scales the numbers are unknown: copy the checkpoint again"
        )
    checked = set()
    for key, codes in sources.items():
        if codes.scales is not None:
            kind = codes.shape, codes.dtype, codes.scales.shape, codes.scales.dtype
            if kind not in checked:
                checked.add(kind)
                _check_scales(folder, key, codes, codes.scales, block)


def _check_scales(
    folder: Path, key: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int]
) -> None:
    if codes.encoding == "fp8":
        *lead, rows, cols = codes.shape
        asked = (*lead, -(-rows // block[0]), -(-cols // block[1]))
        code_dtype = "F8_E4M3"
        scale_dtypes = FLOAT_DTYPES | {"F8_E8M0"}
    elif codes.encoding == "int4":
        asked = (*codes.shape[:-1], -(-codes.full_shape[-1] // GROUP))
        code_dtype = "I32"
        scale_dtypes = FLOAT_DTYPES
        if codes.full_shape[-1] % GROUP:
            raise CheckpointError(
                f"{folder}: {key} has rows of {codes.full_shape[-1]} numbers in INT4, and a scale covers "
                f"{GROUP} numbers, which does not divide the row. Copy the checkpoint again"
            )
    else:
        asked = codes.shape[:-1]
        code_dtype = "U8"
        scale_dtypes = {"U8"}
        if codes.shape[-1] != GROUP // 2:
            raise CheckpointError(
                f"{folder}: {key}_blocks is {list(codes.shape)}, and MXFP4 has {GROUP // 2} bytes "
                "a block. Copy the checkpoint again"
            )
    if scales.shape != asked or codes.dtype != code_dtype or scales.dtype not in scale_dtypes:
        raise CheckpointError(
            f"{folder}: {key} is {list(codes.shape)} {codes.dtype} with scales {list(scales.shape)} "
            f"{scales.dtype}, and {codes.encoding} needs scales {list(asked)} for "
            f"{code_dtype}. Compare config.json's quantization_config with the files"
        )


def _check_experts(
    folder: Path, sources: dict[str, StoredTensor], config: ModelConfig, keys: KeyMap
) -> None:
    """Raise ``CheckpointError`` if the files have another number of experts than ``config``.

    The error would otherwise list thousands of missing keys.
    """
    if keys.fused:
        sizes = [one.full_shape[0] for key, one in sources.items() if key.endswith(f".{keys.gate}")]
        count = sizes[0] if sizes else 0
    else:
        count = len({keys.expert_of(key) for key in sources} - {None})
    if count and count != config.num_experts:
        raise CheckpointError(
            f"{folder} holds {count} experts a layer, and its configuration says {config.num_experts}. Correct that "
            f"(model.num_experts, or the number in its config.json), or complete the checkpoint"
        )


def split(
    tensors: dict[str, StoredTensor], names: Names, config: ModelConfig, keys: KeyMap
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return the model's tensors by plain name, and all others by name in the files.

    MTP modules (arXiv 2412.19437, section 2.2) follow the last layer and are recognised by the
    projection that joins their two inputs. A surplus layer without this projection is kept among
    the model's tensors, so that the files of a larger model are refused.
    """
    plain = {key: names.plain(key) for key in tensors}
    projection = re.compile(r"(model\.layers\.(\d+)\.)eh_proj\.weight")
    found = [match for name in plain.values() if (match := projection.fullmatch(name or ""))]
    modules = ("mtp.", *(match[1] for match in found if int(match[2]) not in config.all_layers))
    ignored = [re.compile(pattern) for pattern in keys.unread]
    text, beside = {}, {}
    for key, name in plain.items():
        other = name is None or name.startswith(modules)
        if other or any(pattern.search(name) for pattern in ignored):
            beside[key] = tensors[key]
        else:
            text[name] = tensors[key]
    return text, beside


def _without_codes(
    folder: Path, beside: dict[str, StoredTensor], encoding: Encoding
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors that an export can copy, and notes about the others.

    An export's config.json states the export's own quantization, so copied codes would be misread.
    Quantized modules for multi-token prediction are left out.

    Raises:
        CheckpointError: a part of a wrapper is quantized.
    """
    coded = {} if encoding == "plain" else {
        part_of(key): key for key, one in beside.items() if one.dtype not in FLOAT_DTYPES
    }  # fmt: skip
    for part, key in coded.items():
        if part != "mtp." and "layers." not in part:
            raise CheckpointError(
                f"{folder}: {key} is quantized ({beside[key].dtype}), and parts beside the text model are copied into "
                "an export, which is quantized differently or not at all. Take the checkpoint in bfloat16"
            )
    kept = {key: one for key, one in beside.items() if part_of(key) not in coded}
    notes = [f"not read, and not in an export, since it is quantized: {part}*" for part in coded]
    return kept, notes


def _remove_unread(sources: dict[str, StoredTensor], config: ModelConfig) -> list[str]:
    """Remove tensors that the model computes or ties; return notes that name them."""
    reasons = {"*.rotary_emb.inv_freq": "computed, not trained"}
    if config.tie_embeddings:
        reasons[HEAD] = f"a copy of {EMBEDDING}"
    notes = []
    for shown, reason in reasons.items():
        unread = [key for key in sources if fnmatchcase(key, shown)]
        for key in unread:
            del sources[key]
        if unread:
            notes.append(f"not read: {shown} ({len(unread)}), {reason}")
    return notes
