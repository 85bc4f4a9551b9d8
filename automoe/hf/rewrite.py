"""A checkpoint's tensors written anew without ranks: another dtype, layout or quantization, one tensor at a time.

The same adapter as for a model on a mesh: every tensor to be written is a region of one of ours, filled from the
source's files as a rank's shard is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError
from automoe.hf.catalog import Catalog
from automoe.hf.families.registry import family_of
from automoe.hf.files import INDEX_FILE
from automoe.hf.folder import write_json
from automoe.hf.keys import KeyMap, Piece, hf_pieces, our_tensors
from automoe.hf.quantized import dequantize_fp8, quantize_fp8
from automoe.hf.shard_files import FilesWriter, Item, file_names, is_quantized_in_fp8, item_of, split
from automoe.hf.shards import LocalShard
from automoe.hf.strips import Read, plan_strips, plan_units, rectangles
from automoe.hf.transfer import DTYPES, Transfer


class Rewritten(NamedTuple):
    """What was written; ``dtype`` is the first parameter's."""

    num_tensors: int
    num_files: int
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Job:
    """One tensor to be written, and the regions of ours that it is made of."""

    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]
    dtype: torch.dtype
    item: Item


def rewrite_tensors(
    catalog: Catalog,
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype | None,
    *,
    keys: KeyMap | None = None,
    fp8: bool = False,
    max_shard_bytes: int = 5 << 30,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Rewritten:
    """Write every tensor of ``catalog`` into safetensors files in ``folder``, with an index where they are several.

    Args:
        dtype: of parameters; None keeps each one's own, bfloat16 for quantized ones. Buffers keep theirs.
        keys: layout to write; default: as the family is published.
        fp8: quantize what block-FP8 checkpoints quantize.
        advance: told of every number of bytes read.
    """
    jobs = list(_jobs(catalog, config, keys or family_of(config).keys, dtype, fp8))
    bins = split((job.item for job in jobs), max_shard_bytes)
    names = file_names(len(bins))
    files = FilesWriter([(folder / name, one) for name, one in zip(names, bins, strict=True)])
    try:
        with torch.no_grad():
            for job in jobs:
                files.write(job.item, _assemble(job, catalog, advance))
    finally:
        files.close()
    weight_map = {entry.key: name for name, one in zip(names, bins, strict=True) for item in one for entry in item}
    total = sum(entry.num_bytes for job in jobs for entry in job.item)
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX_FILE, index)
    return Rewritten(len(weight_map), len(names), total, jobs[0].item[0].dtype)


def compare_rewritten(
    source: Catalog,
    written: Catalog,
    config: ModelConfig,
    dtype: torch.dtype | None,
    keys: KeyMap,
    fp8: bool,
) -> None:
    """Every number of ``written``, read back from its files, against the one of ``source`` that it was made from.

    Args:
        dtype, keys, fp8: as ``rewrite_tensors`` was told.

    Raises:
        CheckpointError: the first tensor that differs; in FP8, from what rounding the source gives.
    """
    for job in _jobs(source, config, keys, dtype, fp8):
        key = job.pieces[0].key
        wanted, found = (_assemble(job, catalog, lambda num_bytes: None) for catalog in (source, written))
        if len(job.item) > 1:
            wanted = dequantize_fp8(*quantize_fp8(wanted)).to(found.dtype)
        if not torch.equal(wanted, found):
            raise CheckpointError(
                f"{written.folder}: {key} is not what {source.folder} holds: {int((wanted != found).sum())} of "
                f"{wanted.numel()} numbers differ, or are not numbers"
            )


def _jobs(catalog: Catalog, config: ModelConfig, keys: KeyMap, dtype: torch.dtype | None, fp8: bool) -> Iterator[_Job]:
    for name, shape in our_tensors(config):
        by_key: dict[str, list[Piece]] = {}
        for piece in hf_pieces(name, shape, keys):
            by_key.setdefault(piece.key, []).append(piece)
        for key, pieces in by_key.items():
            stored = pieces[0].shape
            quantized = fp8 and is_quantized_in_fp8(key, stored, keys)
            own = _own_dtype(catalog, name, shape, pieces[0])
            if quantized:  # rounded once, to FP8
                out = torch.float32 if own == torch.bfloat16 else own
            else:
                out = own if dtype is None or name.endswith(".expert_bias") else dtype
            yield _Job(name, shape, pieces, out, item_of(key, stored, out, quantized))


def _own_dtype(catalog: Catalog, name: str, shape: tuple[int, ...], piece: Piece) -> torch.dtype:
    """Of the source's tensor that holds the first number of ``piece``; bfloat16 for a quantized one."""
    expert = next((at for at in piece.select if at is not None), 0)
    source = catalog.sources[catalog.number_of[hf_pieces(name, shape, catalog.keys, range(expert, expert + 1))[0].key]]
    return DTYPES[source.data.dtype] if source.encoding == "plain" else torch.bfloat16


def _assemble(job: _Job, catalog: Catalog, advance: Callable[[int], None]) -> torch.Tensor:
    parts = [(piece, _region(job, piece, catalog, advance)) for piece in job.pieces]
    if len(parts) == 1:
        return parts[0][1]
    whole = torch.empty(job.pieces[0].shape, dtype=job.dtype)
    for piece, part in parts:
        found = piece.overlap((0,) * len(job.shape), job.shape)
        assert found is not None
        whole[found[0]] = part
    return whole


def _region(job: _Job, piece: Piece, catalog: Catalog, advance: Callable[[int], None]) -> torch.Tensor:
    """What ``piece`` holds, read from the source as a shard that is just that, in ``piece``'s own order."""
    select = piece.select + (None,) * (len(job.shape) - len(piece.select))
    start = tuple(0 if at is None else at for at in select)
    extent = tuple(size if at is None else 1 for at, size in zip(select, job.shape, strict=True))
    local = torch.empty(extent, dtype=job.dtype)
    shard = LocalShard(job.name, torch.empty(job.shape, device="meta"), local, start)
    strips = plan_strips([shard], catalog)
    units = plan_units(strips, [rectangles(strips)], [0], 0)

    def fill(read: Read, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    Transfer(catalog, 0, None, fill, advance, direct=True).run(units)
    found = piece.overlap(start, extent)
    assert found is not None
    return piece.to_stored(local[found[1]])
