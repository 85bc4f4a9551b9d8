"""A checkpoint's tensors written anew without ranks: another dtype, layout or quantization, one tensor at a time.

As for a model on a mesh: every tensor to be written is a part of one of ours, and is filled from the source's
files as a rank's shard is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError
from automoe.hf.catalog import Catalog
from automoe.hf.files import DTYPES, Item, Written, file_names, item_of, split, write_files, write_index
from automoe.hf.keys import KeyMap, Piece, hf_pieces, is_quantized_in_fp8, our_tensors
from automoe.hf.quantized import dequantize_fp8, quantize_fp8
from automoe.hf.read import Reader, num_not_finite
from automoe.hf.shards import LocalShard


@dataclass(frozen=True)
class Job:
    """One tensor to be written, and the parts of ours that it is made of."""

    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]
    dtype: torch.dtype
    item: Item


def plan_rewrite(
    catalog: Catalog, config: ModelConfig, keys: KeyMap, dtype: torch.dtype | None = None, fp8: bool = False
) -> list[Job]:
    """Every tensor of ``catalog`` in the layout ``keys``, in the order of writing.

    Args:
        dtype: of parameters; None keeps each one's own, bfloat16 for quantized ones. Buffers keep theirs.
        fp8: quantize what block-FP8 checkpoints quantize.
    """
    jobs = []
    for name, shape in our_tensors(config):
        by_key: dict[str, list[Piece]] = {}
        for piece in hf_pieces(name, shape, keys):
            by_key.setdefault(piece.key, []).append(piece)
        for key, pieces in by_key.items():
            stored = pieces[0].shape
            quantized = fp8 and is_quantized_in_fp8(key, stored, keys)
            own = own_dtype(catalog, name, shape, pieces[0])
            if quantized:  # rounded once, to FP8
                out = torch.float32 if own == torch.bfloat16 else own
            else:
                out = own if dtype is None or name.endswith(".expert_bias") else dtype
            jobs.append(Job(name, shape, pieces, out, item_of(key, stored, out, quantized)))
    return jobs


@torch.no_grad()
def rewrite_tensors(
    jobs: list[Job],
    catalog: Catalog,
    folder: Path,
    max_shard_bytes: int = 5 << 30,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Written:
    """Write the tensors of ``catalog`` into safetensors files in ``folder``, with an index where they are several.

    Args:
        max_shard_bytes: largest file, unless one tensor alone is larger.
        advance: told of every number of bytes read.
    """
    contents = split((job.item for job in jobs), max_shard_bytes)
    names = file_names(len(contents))
    with Reader(catalog, advance) as reader:
        paths = (folder / name for name in names)
        write_files(zip(paths, contents, strict=True), (_assemble(job, reader) for job in jobs))
    return write_index(folder, names, contents, jobs[0].dtype)


def compare_rewritten(jobs: list[Job], source: Catalog, written: Catalog) -> None:
    """Every number of ``written``, read back from its files, against the one of ``source`` that it was made from.

    Raises:
        CheckpointError: the first tensor that is not finite, or differs; in FP8, from what rounding the source gives.
    """
    with Reader(source) as from_source, Reader(written) as from_written:
        for job in jobs:
            wanted, found = _assemble(job, from_source), _assemble(job, from_written)
            if odd := num_not_finite(found):
                raise not_exported(source.folder, job.pieces[0].key, odd)
            if len(job.item) > 1:
                wanted = dequantize_fp8(*quantize_fp8(wanted)).to(found.dtype)
            if not torch.equal(wanted, found):
                raise CheckpointError(
                    f"{written.folder}: {job.pieces[0].key} is not what {source.folder} holds: "
                    f"{int((wanted != found).sum())} of {wanted.numel()} numbers differ"
                )


def not_exported(folder: Path, key: str, count: int) -> CheckpointError:
    """Of weights that nobody can compute with."""
    return CheckpointError(
        f"{folder}: {count:,} numbers of {key} are NaN or infinite, and what is exported is finite. Mend them, or "
        "export an earlier checkpoint"
    )


def own_dtype(catalog: Catalog, name: str, shape: tuple[int, ...], piece: Piece) -> torch.dtype:
    """Of the source's tensor that holds the first number of ``piece``; bfloat16 for a quantized one."""
    expert = next((at for at in piece.select if at is not None), 0)
    pieces = hf_pieces(name, shape, catalog.keys, range(expert, expert + 1))
    source = catalog.sources[pieces[0].key] if pieces else next(iter(catalog.sources.values()))  # of a new tensor
    return DTYPES[source.data.dtype] if source.encoding == "plain" else torch.bfloat16


def _assemble(job: Job, reader: Reader) -> torch.Tensor:
    """The tensor to be written, each of its parts read as the shard of a rank that holds just that."""
    whole = torch.empty(job.pieces[0].shape, dtype=job.dtype)
    for piece in job.pieces:
        start = tuple(index or 0 for index in piece.select)
        extent = tuple(size if index is None else 1 for index, size in zip(piece.select, job.shape, strict=True))
        found = piece.overlap(start, extent)
        assert found is not None
        local = piece.from_stored(whole[found[0]]).view(extent)
        shard = LocalShard(job.name, torch.empty(job.shape, device="meta"), local, start)
        reader.fill(reader.plan([shard]))
        reader.catalog.finish(shard)
    return whole
