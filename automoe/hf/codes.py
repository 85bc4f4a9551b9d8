"""Checks of quantized checkpoints: which tensors have scales to decode them, by the headers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed
from automoe.hf.headers import SHAPE, Contents, StoredTensor, coded_shapes
from automoe.hf.keys import Encoding, KeyMap
from automoe.hf.schemes import FLOAT_DTYPES, FORMATS, GLOBAL, Scheme, scheme_of
from automoe.hf.wrapper import Names, quantization_in
from automoe.hf.writers import BASE
from automoe.storage.foreign import brief

# Scales of what a quantized model rounds as it runs; training rounds nothing there.
_ACTIVATIONS = re.compile(r".*\.(input|output|[qkv])(_global)?_scale")
INTEGERS = "I64"


def decodable(
    folder: Path, hf: Mapping[str, Any], tensors: Contents
) -> tuple[Contents, Encoding, tuple[int, int]]:
    """Join quantized tensors' codes with their scales; return tensors, encoding and block size.

    Every reader of a checkpoint directory calls this before it reads weights.

    Args:
        folder: the checkpoint, for errors.
        hf: content of config.json.
        tensors: headers of the stored tensors by name. Names of the text model's tensors have no
            prefix of a vision-language wrapper.

    Returns:
        The tensors by name, with codes and scales of a quantized tensor in one entry; the encoding,
        ``plain`` if nothing is quantized; the numbers of rows and of columns that share a scale.

    Raises:
        CheckpointError: the quantization is unknown, or codes have no scales, or ones of a wrong
            shape or dtype.
    """
    if scales := [
        key for key in tensors if key.endswith(".scale") and f"{key[:-5]}weight" in tensors
    ]:
        raise CheckpointError(
            f"{folder}: {listed(scales)} are scales of DeepSeek-V4's published files, whose quantization_config and "
            "expert_dtype are not read. Convert them to bfloat16 first"
        )
    scheme = scheme_of(quantization_in(hf))
    if isinstance(scheme, str):
        raise CheckpointError(
            f"{folder}/config.json: quantization_config {scheme} can be read. {BASE}"
        )
    sources = _pair_scales(folder, tensors, scheme)
    _check_encodings(folder, sources, scheme)
    return sources, scheme.encoding, scheme.block


def _pair_scales(folder: Path, tensors: Contents, scheme: Scheme) -> Contents:
    """Join each quantized tensor's codes with its scales, under the unquantized tensor's name.

    Args:
        folder: the checkpoint, for errors.
        tensors: headers of the stored tensors by name.
        scheme: quantization that config.json states; it tells how names of codes and scales end.

    Returns:
        Tensors by name; scales of weights are now a field of the entry that they scale, and scales
        of activations are left out.

    Raises:
        CheckpointError: a tensor is stored both as it is and as codes, or its zero points or the
            divisor of its scales are missing.
    """
    encoding = scheme.encoding
    if encoding == "plain":
        return tensors
    codes_end, scales_end, *_, beside_end, least_dims = FORMATS[encoding]
    pairs = {  # name of the codes -> name of the scales
        codes: name
        for name in tensors
        if name.endswith(scales_end)
        and (codes := name[: -len(scales_end)] + codes_end) in tensors
        and len(tensors[codes].shape) >= least_dims
    }
    read_with = {*pairs.values()}
    sources = {}
    for name, data in tensors.items():
        if name in pairs:
            base = name[: len(name) - len(codes_end)]
            if codes_end and base in tensors:
                raise CheckpointError(
                    f"{folder}: {brief(base)} is in {tensors[base].file}, and also as {brief(name)} with scales in "
                    f"{data.file}; nothing says which one counts. Copy the checkpoint again"
                )
            scales = _of_blocks(tensors[pairs[name]])
            if beside_end == GLOBAL or not scheme.symmetric:
                beside = tensors.get(base + beside_end)
                if beside is None:
                    raise CheckpointError(
                        f"{folder}: {base + beside_end} is missing, and the codes in {data.file} cannot be decoded "
                        "without it. Copy the checkpoint again"
                    )
                read_with.add(base + beside_end)
                scales = scales._replace(scales=_of_blocks(beside))
            # The sizes of a matrix stand beside packed codes, and follow from them.
            if codes_end == "_packed":
                read_with.add(base + SHAPE)
            # faster than the constructor, for 90,000 tensors
            sources[base] = tuple.__new__(StoredTensor, (*data[:5], scales, encoding))
        elif name not in read_with:
            sources[name] = data
    return {
        name: stored
        for name, stored in sources.items()
        if name not in read_with and not (name.endswith("_scale") and _ACTIVATIONS.fullmatch(name))
    }


def _of_blocks(stored: StoredTensor) -> StoredTensor:
    """Return the header of a tensor of scales: with shape [1, 1] if it has one number, else unchanged."""
    return stored._replace(shape=(1, 1)) if math.prod(stored.shape) == 1 else stored


def _check_encodings(folder: Path, sources: Contents, scheme: Scheme) -> None:
    """Raise ``CheckpointError`` if codes have no scales, or scales of a wrong shape or dtype.

    Args:
        folder: the checkpoint, for the error.
        sources: headers by name; the header of codes has that of their scales in its field
            ``scales``.
        scheme: quantization that config.json states.
    """
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
        if scheme.encoding == "plain":
            raise CheckpointError(
                f"{folder}: {quantized}, and config.json has no quantization_config that says how. Copy the "
                "checkpoint's own config.json, or convert it to bfloat16"
            )
        form = FORMATS[scheme.encoding]
        raise CheckpointError(
            f"{folder}: {quantized}, and their scales are missing: for codes of {form.dims} dims and more they are "
            f"called *{form.scales}. Without scales the numbers are unknown: copy the checkpoint again"
        )
    checked = set()
    for key, codes in sources.items():
        scales = codes.scales
        if scales is None:
            continue
        kind = codes.shape, codes.dtype, scales[1:3], scales.scales and scales.scales[1:3]
        if kind in checked:
            continue
        checked.add(kind)
        form = FORMATS[codes.encoding]
        shapes = coded_shapes(codes.full_shape, codes.encoding, scheme.block)
        fit = codes.dtype == form.dtype and scales.dtype in form.scale_dtypes
        if (beside := scales.scales) and form.beside == GLOBAL:
            fit = fit and (beside.dtype, beside.shape) == ("F32", (1, 1))
        elif beside:
            rows, cols = shapes[1][-2:]
            zeros = {"I8": (rows, cols)}
            if form.packed > 1:
                zeros["I32"] = (-(-rows // form.packed), cols)
            fit = fit and zeros.get(beside.dtype) == beside.shape
        if not fit or shapes != (codes.shape, scales.shape):
            raise CheckpointError(
                f"{folder}: {key} is {list(codes.shape)} {codes.dtype} with scales {list(scales.shape)} "
                f"{scales.dtype}{f' and {list(beside.shape)} {beside.dtype}' if beside else ''}, and "
                f"{codes.encoding} needs scales {list(shapes[1])} for {form.dtype} {list(shapes[0])}. "
                "Compare config.json's quantization_config with the files"
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
        names: map from names in the files to plain names, which lack a wrapper's prefix.
        keys: layout of the family's tensors; those that it lists as ``unread`` are others.

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
