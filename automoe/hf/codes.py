"""The judge of quantised folders: which codes have scales that decode them, by the headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed
from automoe.hf.headers import ENDS, SHAPE, Contents, StoredTensor, coded_shapes
from automoe.hf.keys import FP8_BLOCK, GROUP, INT4, Encoding, KeyMap
from automoe.hf.wrapper import Names, quantization_in
from automoe.hf.writers import BASE
from automoe.storage.foreign import brief, open_inside

FLOAT_DTYPES = {"F64", "F32", "BF16", "F16"}
# For each encoding: dtype of the codes, and those that scales may have.
_DTYPES = {
    "fp8": ("F8_E4M3", FLOAT_DTYPES | {"F8_E8M0"}),
    "int4": ("I32", FLOAT_DTYPES),
    "mxfp4": ("U8", {"U8"}),
}


def decodable(
    folder: Path, hf: Mapping[str, Any], tensors: Contents
) -> tuple[Contents, Encoding, tuple[int, int]]:
    """Attach scales to quantized codes; return the tensors, their encoding and its block size.

    Every reader of a folder calls this before it reads weights.

    Args:
        hf: content of config.json.
        tensors: headers of the model's tensors, by plain name if automoe will read them.

    Raises:
        CheckpointError: the quantization is unknown, or codes have no scales, or ones of a wrong
            shape or dtype.
    """
    encoding, block = _quantization_of(folder, hf)
    sources = _pair_scales(folder, tensors, encoding)
    _check_encodings(folder, sources, encoding, block)
    return sources, encoding, block


def _quantization_of(folder: Path, hf: Mapping[str, Any]) -> tuple[Encoding, tuple[int, int]]:
    """Return encoding and block size from ``quantization_config`` of a config.json, ``hf``."""
    stated = quantization_in(hf)
    if stated is None:
        return "plain", FP8_BLOCK
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if method == "mxfp4":
        return "mxfp4", FP8_BLOCK
    if method == "compressed-tensors" and isinstance(stated, dict):
        # Only Kimi's INT4 in groups is read.
        groups = stated.get("config_groups")
        schemes = [*groups.values()] if isinstance(groups, dict) else []
        scheme = schemes[0] if schemes and isinstance(schemes[0], dict) else {}
        weights = scheme.get("weights")
        weights = weights if isinstance(weights, dict) else {}
        rows = [  # key, its value, and the only one that is read
            ("format", scheme.get("format") or stated.get("format"), "pack-quantized"),
            ("config_groups", "one" if len(schemes) == 1 else len(schemes), "one"),
            *((key, scheme.get(key), None) for key in ("input_activations", "output_activations")),
            *((key, weights.get(key), value) for key, value in (INT4 | {"actorder": None}).items()),
            *(
                (key, stated.get(key) or "empty", "empty")
                for key in ("transform_config", "sparsity_config")
            ),
        ]
        if wrong := [f"{key}={value}, not {asked}" for key, value, asked in rows if value != asked]:
            raise CheckpointError(
                f"{folder}/config.json: quantization_config of compressed-tensors has {listed(wrong)}, and only "
                f"INT4 with one scale per {GROUP} numbers of a row is read here. {BASE}"
            )
        return "int4", FP8_BLOCK
    if method != "fp8" or not isinstance(stated, dict):
        raise CheckpointError(
            f"{folder}/config.json: quantization_config has quant_method={method}, and only fp8, mxfp4 and "
            f"compressed-tensors (INT4) can be read. {BASE}"
        )
    block = stated.get("weight_block_size")
    sizes = block if isinstance(block, list) and len(block) == 2 else [0, 0]
    known = stated.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
    if not (known and all(type(size) is int and 0 < size < 1 << 31 for size in sizes)):
        raise CheckpointError(
            f"{folder}/config.json: quantization_config has fmt={stated.get('fmt')} and "
            f"weight_block_size={block}, and FP8 is read only as e4m3 with scales per "
            f"block, such as [128, 128]. {BASE}"
        )
    return "fp8", (sizes[0], sizes[1])


def _pair_scales(folder: Path, tensors: Contents, encoding: Encoding) -> Contents:
    """Attach scales to their codes, under the name of the unquantized tensor."""
    if encoding == "plain":
        return tensors
    codes_end, scales_end, least_dims = ENDS[encoding]
    scales_of = {}  # name of the codes -> scales
    paired = set()
    for name in [name for name in tensors if name.endswith(scales_end)]:
        codes = name[: -len(scales_end)] + codes_end
        data = None if name in scales_of or codes in paired else tensors.get(codes)
        if data is not None and len(data.shape) >= least_dims:
            scales_of[codes] = tensors[name]
            paired.add(name)
    sources = {}
    for name, data in tensors.items():
        if (scales := scales_of.get(name)) is not None:
            base = name[: len(name) - len(codes_end)]
            if codes_end and base in tensors:
                raise CheckpointError(
                    f"{folder}: {brief(base)} is in {tensors[base].file}, and also as {brief(name)} with scales in "
                    f"{data.file}; nothing says which one counts. Copy the checkpoint again"
                )
            sources[base] = StoredTensor(*data[:5], scales, encoding)
        elif name not in paired:
            sources[name] = data
    return _check_shapes(folder, sources) if encoding == "int4" else sources


def _check_shapes(folder: Path, sources: Contents) -> Contents:
    """Check the shapes that INT4 stores beside codes; return ``sources`` without these shapes."""
    others = dict(sources)
    opened = {}
    try:
        for name, codes in sources.items():
            stated = others.pop(name + SHAPE, None) if codes.encoding == "int4" else None
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
    return others


def _check_encodings(
    folder: Path, sources: Contents, encoding: Encoding, block: tuple[int, int]
) -> None:
    """Raise ``CheckpointError`` for an unreadable dtype or scales that do not fit the blocks."""
    unscaled = [
        key
        for key, s in sources.items()
        if s.encoding == "plain" and s.dtype not in FLOAT_DTYPES and not key.endswith(SHAPE)
    ]
    if unscaled:
        quantized = f"{len(unscaled)} tensors are quantized ({sources[unscaled[0]].dtype}): {listed(unscaled)}"
        if encoding == "plain":
            raise CheckpointError(
                f"{folder}: {quantized}, and config.json has no quantization_config that says how. Copy the "
                "checkpoint's own config.json, or convert it to bfloat16"
            )
        ends = ENDS[encoding]
        missing = unscaled[0].removesuffix(ends[0]) + ends[1]
        raise CheckpointError(
            f"{folder}: {quantized}, and their scales are missing: {missing} is "
            f"{'for codes of more dims' if missing in sources else 'in no file'}. Without "
            "scales the numbers are unknown: copy the checkpoint again"
        )
    checked = set()
    for key, codes in sources.items():
        scales = codes.scales
        if scales is None:
            continue
        kind = codes.shape, codes.dtype, scales.shape, scales.dtype
        if kind in checked:
            continue
        checked.add(kind)
        shapes = coded_shapes(codes.full_shape, codes.encoding, block)
        code_dtype, scale_dtypes = _DTYPES[codes.encoding]
        fit = codes.dtype == code_dtype and scales.dtype in scale_dtypes
        if not fit or shapes != (codes.shape, scales.shape):
            raise CheckpointError(
                f"{folder}: {key} is {list(codes.shape)} {codes.dtype} with scales {list(scales.shape)} "
                f"{scales.dtype}, and {codes.encoding} needs scales {list(shapes[1])} for {code_dtype} "
                f"{list(shapes[0])}. Compare config.json's quantization_config with the files"
            )


def split(
    tensors: Contents, names: Names, config: ModelConfig, keys: KeyMap
) -> tuple[Contents, Contents]:
    """Split a folder's tensors: the model's by plain name, and the rest by name in the files.

    MTP modules (arXiv 2412.19437, section 2.2) follow the last layer and are recognised by the
    projection that joins their two inputs. A surplus layer without this projection is kept among
    the model's tensors, so that the files of a larger model are refused.
    """
    modules = ("mtp.",)
    for key in tensors:
        if key.endswith(".eh_proj.weight"):
            match = re.fullmatch(r"(model\.layers\.(\d+)\.)eh_proj\.weight", names.plain(key) or "")
            if match and int(match[2]) not in config.all_layers:
                modules += (match[1],)
    ignored = re.compile("|".join(keys.unread))
    text, beside = {}, {}
    for key, stored in tensors.items():
        name = names.plain(key)
        if name is None or name.startswith(modules) or (keys.unread and ignored.search(name)):
            beside[key] = stored
        else:
            text[name] = stored
    return text, beside
