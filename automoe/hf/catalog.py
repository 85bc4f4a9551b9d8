"""What a checkpoint directory holds of a model, and in which encoding: headers read and checked once, on one rank."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from automoe.config.hub import local_folder
from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed
from automoe.hf.families.registry import family_of, read_hf_config
from automoe.hf.headers import StoredTensor, read_headers, without_collection
from automoe.hf.keys import FP8_BLOCK, FUSED, SCALE_SUFFIX, KeyMap, hf_tensors
from automoe.hf.quantized import MXFP4_BLOCK
from automoe.hf.shards import LocalShard
from automoe.hf.untrusted import brief, is_there
from automoe.hf.upcycle import Upcycling
from automoe.parallel.agreement import Ranks

FLOAT_DTYPES = {"F64", "F32", "BF16", "F16"}
Encoding = Literal["plain", "fp8", "mxfp4"]


class Source(NamedTuple):
    """How one tensor of the model's checkpoint is stored.

    Attributes:
        shape: of the tensor that it stands for. MXFP4 stores its transpose, [..., C, R] for [..., R, C].
        data: numbers or codes.
        scales: those of the codes.
    """

    shape: tuple[int, ...]
    data: StoredTensor
    scales: StoredTensor | None = None
    encoding: Encoding = "plain"


class SourceColumns(Mapping[str, Source]):
    """Sources as other ranks receive them: in columns, a fifth of the time to send of a hundred thousand objects.

    A ``Source`` is made of what a rank asks for.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._rows = {name: row for row, name in enumerate(sources)}
        shapes, data, scales, self._encodings = zip(*sources.values(), strict=True)
        self._shapes, self._data = shapes, _columns(data)
        # In the place of scales that there are none of, the numbers again: the encoding tells.
        self._scales = _columns(one or other for one, other in zip(scales, data, strict=True))

    def __getitem__(self, name: str) -> Source:
        row = self._rows[name]
        data, scales = (StoredTensor(*(column[row] for column in each)) for each in (self._data, self._scales))
        encoding = self._encodings[row]
        return Source(self._shapes[row], data, None if encoding == "plain" else scales, encoding)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _columns(tensors: Iterable[StoredTensor]) -> tuple[Sequence[Any], ...]:
    *named, starts, sizes = zip(*tensors, strict=True)
    return *named, array("q", starts), array("q", sizes)


@dataclass(frozen=True)
class Catalog:
    """Every tensor that a model needs from a checkpoint directory, in file order.

    Attributes:
        folder: the directory.
        keys: the names by which it holds the model's tensors.
        block: rows and columns under one scale in block-FP8.
        sources: by the tensor's name.
        upcycling: the directory is dense and the model is not.
    """

    folder: Path
    keys: KeyMap
    sources: Mapping[str, Source]
    block: tuple[int, int] = FP8_BLOCK
    upcycling: Upcycling | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"sources": SourceColumns(self.sources)}

    def finish(self, shard: LocalShard) -> None:
        """What is left to do for a shard that is filled from the files."""
        if self.upcycling is not None:
            self.upcycling.finish(shard)


@without_collection()
def open_catalog(path: str | Path, config: ModelConfig, upcycling: Upcycling | None = None) -> Catalog:
    """Headers of every file, read and checked against the whole model on rank 0, for all ranks. Collective.

    Args:
        upcycling: ``path`` is dense, and ``config`` what it is to become.

    Raises:
        CheckpointError: on every rank alike: a file missing, truncated or a Git LFS pointer, keys missing or
            unexpected, another shape or number of experts, FP8 without scales, an unknown quantization.
    """
    return Ranks().lead(lambda: check_catalog(path, config, upcycling))


@without_collection()
def check_catalog(path: str | Path, config: ModelConfig, upcycling: Upcycling | None = None) -> Catalog:
    """``open_catalog`` of this process alone."""
    folder = local_folder(path)
    tensors = read_headers(folder)
    encoding, block = _quantization(folder)
    sources = _pair_scales(folder, tensors, encoding)
    keys = family_of(config).keys if upcycling is None else upcycling.keys
    if any(key.endswith(f".{FUSED.gate}") for key in sources):
        keys = keys.in_memory
    wanted = hf_tensors(config, keys)
    missing = [key for key in wanted if key not in sources]
    ignored = _ignored(sources, config)
    unexpected = [key for key in sources if key not in wanted and key not in ignored]
    wrong = [key for key in wanted if key in sources and sources[key].shape != tuple(wanted[key])]
    if missing or unexpected or wrong:
        _check_experts(folder, {key: sources[key] for key in sources if key not in ignored}, config, keys)
    if missing or unexpected:
        found = [f"{len(missing)} tensors are missing: {listed(missing)}"] if missing else []
        found += [f"{len(unexpected)} are not the model's: {listed(unexpected)}"] if unexpected else []
        raise CheckpointError(
            f"{folder} does not hold this {config.family} model of {config.num_layers} layers and "
            f"{len(wanted)} tensors: {'; '.join(found)}. Compare the model's configuration with its config.json"
        )
    if wrong:
        shapes = [f"{key} is {list(sources[key].shape)}, not {list(wanted[key])}" for key in wrong[:4]]
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors have another shape than the model's: {'; '.join(shapes)}. "
            "Compare the model's configuration with its config.json"
        )
    used = {key: source for key, source in sources.items() if key in wanted}
    _check_encodings(folder, used, encoding, block)
    return Catalog(folder, keys, used, block, upcycling)


def _quantization(folder: Path) -> tuple[Encoding, tuple[int, int]]:
    """The encoding of tensors that have scales, and the block under one, by config.json's ``quantization_config``."""
    stated = read_hf_config(folder).get("quantization_config") if is_there(folder, "config.json") else None
    if stated is None:
        return "plain", FP8_BLOCK
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if method == "fp8" and isinstance(stated, dict):
        block: Any = stated.get("weight_block_size")
        pair = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in block)
        if not pair or stated.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(
                f"{folder}/config.json: quantization_config has fmt={stated.get('fmt')} and "
                f"weight_block_size={stated.get('weight_block_size')}, and FP8 is read here as e4m3 with scales a "
                "block, such as [128, 128]. Convert it to bfloat16"
            )
        return "fp8", (block[0], block[1])
    if method == "mxfp4":
        return "mxfp4", FP8_BLOCK
    raise CheckpointError(
        f"{folder}/config.json: quantization_config has quant_method={method}, and fp8 and mxfp4 are read here. "
        "Convert it to bfloat16"
    )


def _pair_scales(folder: Path, tensors: dict[str, StoredTensor], encoding: Encoding) -> dict[str, Source]:
    """Codes and their scales become one tensor, in the place of the codes, under the name it has unquantized."""
    codes_end, scales_end, least_dims = ("", SCALE_SUFFIX, 2) if encoding == "fp8" else ("_blocks", "_scales", 3)
    scales_of: dict[str, StoredTensor] = {}  # by the name of the codes
    paired: set[str] = set()
    for name in tensors if encoding != "plain" else ():
        if name.endswith(scales_end) and name not in scales_of:
            codes = name[: -len(scales_end)] + codes_end
            if codes in tensors and codes not in paired and len(tensors[codes].shape) >= least_dims:
                scales_of[codes] = tensors[name]
                paired.add(name)
    sources: dict[str, Source] = {}
    for name, data in tensors.items():
        if name in scales_of:
            shape = data.shape
            if encoding == "mxfp4":
                *lead, rows, groups, half = shape
                shape = (*lead, 2 * groups * half, rows)
            base = name[: len(name) - len(codes_end)]
            if codes_end and base in tensors:
                raise CheckpointError(
                    f"{folder}: {brief(base)} is in {tensors[base].file}, and as {brief(name)} with scales in "
                    f"{data.file}; which one counts is not said. Copy the checkpoint again"
                )
            sources[base] = Source(shape, data, scales_of[name], encoding)
        elif name not in paired:
            sources[name] = Source(data.shape, data)
    return sources


def _check_encodings(folder: Path, sources: dict[str, Source], encoding: Encoding, block: tuple[int, int]) -> None:
    """Every tensor has a dtype that is read, its scales the shape that its blocks ask for."""
    unscaled = [key for key, s in sources.items() if s.encoding == "plain" and s.data.dtype not in FLOAT_DTYPES]
    if unscaled:
        what = f"{len(unscaled)} tensors are quantized ({sources[unscaled[0]].data.dtype}): {listed(unscaled)}"
        if encoding == "plain":
            raise CheckpointError(
                f"{folder}: {what}, and config.json has no quantization_config that says how. Copy the "
                "checkpoint's own config.json, or convert it to bfloat16"
            )
        raise CheckpointError(
            f"{folder}: {what}, and their scales are missing: {unscaled[0]}{SCALE_SUFFIX} is in no file. Without "
            "scales the numbers are unknown: copy the checkpoint again"
        )
    checked = set()
    for key, source in sources.items():
        data, scales = source.data, source.scales
        if scales is not None and (kind := (data.shape, data.dtype, scales.shape, scales.dtype)) not in checked:
            checked.add(kind)
            _check_encoding(folder, key, source, block)


def _check_encoding(folder: Path, key: str, source: Source, block: tuple[int, int]) -> None:
    data, scales = source.data, source.scales
    if scales is not None:
        if source.encoding == "fp8":
            *lead, rows, cols = data.shape
            asked = (*lead, -(-rows // block[0]), -(-cols // block[1]))
            code_dtype, scale_dtypes = "F8_E4M3", FLOAT_DTYPES | {"F8_E8M0"}
        else:
            asked, code_dtype, scale_dtypes = data.shape[:-1], "U8", {"U8"}
            if data.shape[-1] != MXFP4_BLOCK // 2:
                raise CheckpointError(
                    f"{folder}: {key}_blocks is {list(data.shape)}, and MXFP4 has {MXFP4_BLOCK // 2} bytes "
                    "a block. Copy the checkpoint again"
                )
        if scales.shape != asked or data.dtype != code_dtype or scales.dtype not in scale_dtypes:
            raise CheckpointError(
                f"{folder}: {key} is {list(data.shape)} {data.dtype} with scales {list(scales.shape)} "
                f"{scales.dtype}, and {source.encoding} of it has scales {list(asked)} for "
                f"{code_dtype}. Compare config.json's quantization_config with the files"
            )


def _check_experts(folder: Path, sources: dict[str, Source], config: ModelConfig, keys: KeyMap) -> None:
    """Another number of experts would show as thousands of missing or unexpected keys: say it plainly."""
    if keys.fused:
        count = next((source.shape[0] for key, source in sources.items() if key.endswith(f".{FUSED.gate}")), 0)
    else:
        count = len({keys.expert_of(key) for key in sources} - {None})
    if count and count != config.num_experts:
        raise CheckpointError(
            f"{folder} holds {count} experts a layer, and its configuration says {config.num_experts}. Correct that "
            f"(model.num_experts, or the number in its config.json), or complete the checkpoint"
        )


def _ignored(sources: dict[str, Source], config: ModelConfig) -> set[str]:
    """What is stored but never ours: MTP modules, rotary tables, a second copy of a tied head.

    MTP modules (arXiv 2412.19437, section 2.2) follow the last layer and are recognised by the projection that
    joins their two inputs. Without it, such a layer belongs to a larger model.
    """
    projection = re.compile(r"(model\.layers\.(\d+)\.)eh_proj\.weight")
    found = [match for key in sources if (match := projection.fullmatch(key))]
    modules = ("mtp.", *(match[1] for match in found if int(match[2]) >= config.num_layers))
    return {
        key
        for key in sources
        if key.startswith(modules)
        or key.endswith("rotary_emb.inv_freq")
        or (config.tie_embeddings and key == "lm_head.weight")
    }
