"""The judge of quantised folders: which codes have scales that decode them, by the headers alone."""

from __future__ import annotations

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
from automoe.storage.foreign import brief

FLOAT_DTYPES = {"F64", "F32", "BF16", "F16"}
INTEGERS = "I64"
# For each encoding: dtype of the codes, and those that scales may have.
_DTYPES = {
    "fp8": ("F8_E4M3", FLOAT_DTYPES | {"F8_E8M0"}),
    "int4": ("I32", FLOAT_DTYPES),
    "mxfp4": ("U8", {"U8"}),
}
# Settings of compressed-tensors that are read.
_INT4_READ = INT4 | {"config_groups": 1, "format": "pack-quantized", "actorder": None}
_INT4_READ |= dict.fromkeys(("input_activations", "output_activations"))
_INT4_READ |= dict.fromkeys(("transform_config", "sparsity_config"))


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
    """Return the encoding and FP8 block size (rows, columns) that config.json declares.

    Args:
        hf: content of config.json. Without ``quantization_config`` the encoding is ``plain``.

    Raises:
        CheckpointError: the quantization cannot be read.
    """
    stated = quantization_in(hf)
    if stated is None:
        return "plain", FP8_BLOCK
    method = stated.get("quant_method")
    if method == "mxfp4":
        return "mxfp4", FP8_BLOCK
    if method == "compressed-tensors":
        groups = stated.get("config_groups")
        schemes = [*groups.values()] if isinstance(groups, dict) else []
        scheme = schemes[0] if len(schemes) == 1 and isinstance(schemes[0], dict) else {}
        weights = scheme.get("weights")
        said = weights if isinstance(weights, dict) else {}
        said = said | {
            "config_groups": len(schemes),
            "format": scheme.get("format") or stated.get("format"),
            "input_activations": scheme.get("input_activations"),
            "output_activations": scheme.get("output_activations"),
            "transform_config": stated.get("transform_config") or None,
            "sparsity_config": stated.get("sparsity_config") or None,
        }
        wrong = [
            f"{key}={said.get(key)}, not {value}"
            for key, value in _INT4_READ.items()
            if said.get(key) != value
        ]
        if not wrong:
            return "int4", FP8_BLOCK
        odd = f"of compressed-tensors has {listed(wrong)}, and only INT4 with one scale per {GROUP} numbers of a row"
    elif method == "fp8":
        block = stated.get("weight_block_size")
        sizes = block if isinstance(block, list) and len(block) == 2 else [0, 0]
        known = stated.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
        if known and all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
            return "fp8", (sizes[0], sizes[1])
        odd = f"has fmt={stated.get('fmt')} and weight_block_size={block}, and FP8 only as e4m3 with scales per block"
    else:
        odd = f"has quant_method={method}, and only fp8, mxfp4 and compressed-tensors (INT4)"
    raise CheckpointError(f"{folder}/config.json: quantization_config {odd} can be read. {BASE}")


def _pair_scales(folder: Path, tensors: Contents, encoding: Encoding) -> Contents:
    """Join each quantized tensor's codes with its scales, under the unquantized tensor's name.

    Returns:
        All tensors by name; those of scales are now part of their codes' entries.
    """
    if encoding == "plain":
        return tensors
    codes_end, scales_end, least_dims = ENDS[encoding]
    pairs = {}  # name of the codes -> name of the scales
    for name in tensors:
        if name.endswith(scales_end):
            codes = name[: -len(scales_end)] + codes_end
            if codes in tensors and len(tensors[codes].shape) >= least_dims:
                pairs[codes] = name
    scale_names = {*pairs.values()}
    sources = {}
    for name, data in tensors.items():
        if name in pairs:
            base = name[: len(name) - len(codes_end)]
            if codes_end and base in tensors:
                raise CheckpointError(
                    f"{folder}: {brief(base)} is in {tensors[base].file}, and also as {brief(name)} with scales in "
                    f"{data.file}; nothing says which one counts. Copy the checkpoint again"
                )
            sources[base] = StoredTensor(*data[:5], tensors[pairs[name]], encoding)
        elif name not in scale_names:
            sources[name] = data
    if encoding == "int4":  # the sizes of a matrix stand beside its codes, and follow from them
        coded = [name for name, stored in sources.items() if stored.encoding == encoding]
        for name in coded:
            sources.pop(name + SHAPE, None)
    return sources


def _check_encodings(
    folder: Path, sources: Contents, encoding: Encoding, block: tuple[int, int]
) -> None:
    """Raise ``CheckpointError`` for an unreadable dtype, or scales that do not fit their codes."""
    unscaled = [
        key
        for key, s in sources.items()
        # int64 holds no codes; ``check_catalog`` knows which tensors may have it
        if s.encoding == "plain"
        and s.dtype not in (*FLOAT_DTYPES, INTEGERS)
        and not key.endswith(SHAPE)
    ]
    if unscaled:
        quantized = f"{len(unscaled)} tensors are quantized ({sources[unscaled[0]].dtype}): {listed(unscaled)}"
        if encoding == "plain":
            raise CheckpointError(
                f"{folder}: {quantized}, and config.json has no quantization_config that says how. Copy the "
                "checkpoint's own config.json, or convert it to bfloat16"
            )
        ends = ENDS[encoding]
        raise CheckpointError(
            f"{folder}: {quantized}, and their scales are missing: for codes of {ends[2]} dims and more they are "
            f"called *{ends[1]}. Without scales the numbers are unknown: copy the checkpoint again"
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
    """Split a folder's tensors into those of the text model and all others.

    MTP modules (arXiv 2412.19437, section 2.2) follow the last layer and are recognised by the
    projection that joins their two inputs. A surplus layer without this projection is kept among
    the model's tensors, so that the files of a larger model are refused.

    Args:
        tensors: stored tensors by name in the files.
        names: map from names in the files to plain names, those of a text model alone.

    Returns:
        (the model's tensors by plain name, other tensors by name in the files).
    """
    modules = ["mtp."]
    for key in tensors:
        if key.endswith(".eh_proj.weight"):
            layer = re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", names.plain(key) or "")
            if layer and int(layer[1]) not in config.all_layers:
                modules.append(f"model.layers.{layer[1]}.")
    beside_model = tuple(modules)
    ignored = re.compile("|".join(keys.unread))
    text, beside = {}, {}
    for key, stored in tensors.items():
        name = names.plain(key)
        if name is None or name.startswith(beside_model) or (keys.unread and ignored.search(name)):
            beside[key] = stored
        else:
            text[name] = stored
    return text, beside
