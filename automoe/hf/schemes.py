"""Encodings of quantized tensors in files, and the settings in config.json that state them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from automoe.hf.keys import FP8_BLOCK, GROUP, SCALE_SUFFIX, Encoding

FLOAT_DTYPES = frozenset({"F64", "F32", "BF16", "F16"})
WHOLE = 1 << 31  # a block longer than any dim
_E8M0 = frozenset({"U8"})


class Format(NamedTuple):
    """How files store tensors of one encoding: matrices [R, C], and scales of blocks of them.

    Attributes:
        codes, scales: suffixes of the names of codes and of scales.
        dtype: dtype of the codes.
        scale_dtypes: dtypes that scales may have; U8 holds exponents with bias 127 (e8m0).
        packed: numbers in each element of the codes, the earlier ones in its lower bits.
        beside: suffix of a third tensor. ``_zero_point``: codes of zero, if the scheme is not
            symmetric, packed along R if the codes are packed. ``_global_scale``: divisor of all
            scales.
        dims: smallest number of dims that codes have.
    """

    codes: str
    scales: str
    dtype: str
    scale_dtypes: frozenset[str]
    packed: int = 1
    beside: str = ""
    dims: int = 2


_ZEROS, GLOBAL = "_zero_point", "_global_scale"
FORMATS: dict[Encoding, Format] = {
    "fp8": Format("", SCALE_SUFFIX, "F8_E4M3", FLOAT_DTYPES | {"F8_E8M0"}),
    "mxfp4": Format("_blocks", "_scales", "U8", _E8M0, 2, dims=3),
    # Those of compressed-tensors 0.19 and 0.20:
    "int4": Format("_packed", "_scale", "I32", FLOAT_DTYPES, 8, _ZEROS),
    "int8_packed": Format("_packed", "_scale", "I32", FLOAT_DTYPES, 4, _ZEROS),
    "int8": Format("", "_scale", "I8", FLOAT_DTYPES, 1, _ZEROS),
    "float8": Format("", "_scale", "F8_E4M3", FLOAT_DTYPES | _E8M0),
    "mxfp4_rows": Format("_packed", "_scale", "U8", _E8M0, 2),
    "nvfp4": Format("_packed", "_scale", "U8", frozenset({"F8_E4M3"}), 2, GLOBAL),
}
# format, type and bits of compressed-tensors -> encoding
_COMPRESSED: dict[tuple[Any, ...], Encoding] = {
    ("pack-quantized", "int", 4): "int4",
    ("pack-quantized", "int", 8): "int8_packed",
    ("int-quantized", "int", 8): "int8",
    ("naive-quantized", "int", 8): "int8",
    ("float-quantized", "float", 8): "float8",
    ("naive-quantized", "float", 8): "float8",
    ("mxfp8-quantized", "float", 8): "float8",
    ("mxfp4-pack-quantized", "float", 4): "mxfp4_rows",
    ("nvfp4-pack-quantized", "float", 4): "nvfp4",
}
# Settings of the weights that decide what codes and scales mean.
_DECIDES = ("strategy", "group_size", "block_structure", "symmetric", "actorder")
_READ = "INT4, INT8, FP8 (e4m3), MXFP4, MXFP8 and NVFP4 of one scheme"


class Scheme(NamedTuple):
    """Quantization that a ``quantization_config`` states.

    Attributes:
        encoding: rule that turns codes and scales into numbers, such as ``fp8``; ``plain``: none.
        block: (rows, columns) of a block whose numbers share a scale.
        symmetric: False if blocks have zero points.
    """

    encoding: Encoding = "plain"
    block: tuple[int, int] = FP8_BLOCK
    symmetric: bool = True


def scheme_of(stated: Mapping[str, Any] | None) -> Scheme | str:
    """Return encoding and scale blocks that a ``quantization_config`` states; for None ``plain`` numbers.

    If automoe cannot read such a checkpoint, return why: the end of a sentence that begins
    ``quantization_config``.
    """
    if stated is None:
        return Scheme()
    method = stated.get("quant_method")
    if method == "mxfp4":
        return Scheme("mxfp4", (1, GROUP))
    if method == "compressed-tensors":
        return _compressed(stated)
    if method != "fp8":
        return f"has quant_method={method}, and only fp8, mxfp4 and compressed-tensors"
    block = stated.get("weight_block_size")
    known = stated.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
    if known and (sizes := _sizes(block)):
        return Scheme("fp8", sizes)
    return f"has fmt={stated.get('fmt')} and weight_block_size={block}, and FP8 only as e4m3 with scales per block"


def _compressed(stated: Mapping[str, Any]) -> Scheme | str:
    """Return encoding and scale blocks that all ``config_groups`` of a compressed-tensors configuration share.

    If groups differ or cannot be read, return why: the end of a sentence that begins
    ``quantization_config``.
    Settings for activations are ignored, because only weights are read.
    """
    groups = stated.get("config_groups")
    schemes = [*groups.values()] if isinstance(groups, dict) else []
    pairs = []
    for scheme in schemes:
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if not isinstance(weights, dict):
            return f"of compressed-tensors has a group with weights={weights}, and only {_READ}"
        pairs.append((scheme.get("format") or stated.get("format"), weights))
    formats = [
        (kind, *map(weights.get, ("type", "num_bits", *_DECIDES))) for kind, weights in pairs
    ]
    if not formats or formats[:1] * len(formats) != formats:
        kinds = [list(kind[:3]) for kind in formats]
        return f"of compressed-tensors has groups with format, type and num_bits of {kinds}, and only {_READ}"
    [(kind, weights), *_] = pairs
    encoding = _COMPRESSED.get(formats[0][:3])
    block = _block(weights)
    odd = {
        key: value for key in ("transform_config", "sparsity_config") if (value := stated.get(key))
    }
    if weights.get("actorder") not in (None, False, "weight", "static"):
        odd["actorder"] = weights["actorder"]
    symmetric = weights.get("symmetric", True) is True
    if encoding and not symmetric and FORMATS[encoding].beside != _ZEROS:
        odd["symmetric"] = weights["symmetric"]
    if encoding and block and not odd:
        return Scheme(encoding, block, symmetric)
    odd |= {key: weights.get(key) for key in ("type", "num_bits", *_DECIDES[:3])}
    said = ", ".join(f"{key}={value}" for key, value in {"format": kind, **odd}.items())
    return f"of compressed-tensors has {said}, and only {_READ}"


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns that share a scale; None for a strategy that automoe does not know.

    Args:
        weights: section ``weights`` of a compressed-tensors configuration.
    """
    size = weights.get("group_size")
    groups = (1, size) if type(size) is int and size > 0 and size % 8 == 0 else None
    return {
        "tensor": (WHOLE, WHOLE),
        "channel": (1, WHOLE),
        "group": groups,
        "tensor_group": groups,
        "block": _sizes(weights.get("block_structure")),
    }.get(str(weights.get("strategy")))


def _sizes(block: Any) -> tuple[int, int] | None:
    """Return the two sizes of a block in a configuration, rows and columns; None if malformed."""
    sizes = block if isinstance(block, list) and len(block) == 2 else [0, 0]
    fit = all(type(size) is int and 0 < size < WHOLE for size in sizes)
    return (sizes[0], sizes[1]) if fit else None
