"""A model on any mesh written as a HuggingFace checkpoint directory, all of it or nothing.

Every rank streams the tensors that it was given to write into files of its own; what is gathered at
once is one tensor of the checkpoint. The directory gets its name when everything is on disk and checked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automoe.config.schema import Config
from automoe.errors import AutomoeError, CheckpointError
from automoe.hf.families.registry import family_of
from automoe.hf.files import INDEX_FILE
from automoe.hf.folder import commit_folder, prepare_folder, working_folder, write_beside, write_json
from automoe.hf.gather import Outgoing, gather, plan_outgoing
from automoe.hf.reader import config_of
from automoe.hf.shard_files import FilesWriter, file_names, fp8_config, split
from automoe.hf.shards import (
    Parts,
    as_parts,
    export_dtype,
    is_first_rank,
    on_every_rank,
    on_first_rank,
    raise_everywhere,
)
from automoe.hf.verifier import verify_hf
from automoe.model.decoder import Decoder


@dataclass(frozen=True)
class Written:
    """What was written, and how it was found equal.

    Attributes:
        num_tensors, num_files, num_bytes: sizes of the whole checkpoint.
        checked: compared with the live weights and with transformers.
        fp8: quantized, so equal to the weights only after their quantization.
        logits_error: relative difference to transformers' logits; None for a model too large to be run
            twice, and on ranks other than the first.
    """

    path: Path
    num_tensors: int
    num_files: int
    num_bytes: int
    checked: bool = False
    fp8: bool = False
    logits_error: float | None = None

    def __str__(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        text = f"{self.path} ({self.num_tensors:,} tensors, {self.num_bytes / 1e6:,.1f} MB in {files}"
        if self.checked:
            text += "; " + ("FP8 of the weights" if self.fp8 else "equal bit for bit to the weights")
        if self.logits_error is not None:
            text += f", logits to transformers' within {self.logits_error:.0e}"
        return f"{text})"


def export_and_verify(
    parts: Parts | Decoder,
    path: str | Path,
    config: Config,
    *,
    dtype: str = "keep",
    fp8: bool = False,
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = True,
) -> Written:
    """Write a HuggingFace checkpoint of a run's model and prove it; only then it gets its name. Collective.

    Args:
        parts: this rank's pipeline stages.
        config: the run's configuration; its tokenizer goes with the weights.
        dtype, fp8, max_shard_bytes, overwrite: see ``save_hf``.

    Raises:
        CheckpointError: on every rank alike, when it could not be written or is not equal; nothing new
            is left under ``path`` then.
    """
    return export_model(
        parts,
        path,
        tokenizer=config.data.tokenizer,
        dtype=dtype,
        fp8=fp8,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def export_model(
    parts: Parts | Decoder, path: str | Path, *, dtype: str = "keep", fp8: bool = False, **options: Any
) -> Written:
    """``export_and_verify`` for a model without a run; ``options`` are those of ``save_hf``. Collective."""
    errors: list[float | None] = []
    written = save_hf(
        parts,
        path,
        dtype=dtype,
        fp8=fp8,
        check=lambda folder: errors.append(verify_hf(parts, folder, dtype=dtype, fp8=fp8)),
        **options,
    )
    return replace(written, checked=True, logits_error=errors[0], fp8=fp8)


def save_hf(
    parts: Parts | Decoder,
    path: str | Path,
    *,
    dtype: str = "keep",
    fp8: bool = False,
    max_shard_bytes: int = 5 << 30,
    tokenizer: str | None = None,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Written:
    """Write a checkpoint directory that ``transformers`` loads. Collective; ranks share the file system.

    ``model.hf_path`` of the model's configuration, where it is set, gives what weights cannot tell:
    token ids, generation settings, tokenizer files.

    Args:
        parts: the model, or this rank's pipeline stages of it.
        dtype: ``keep`` (the parameters' own), ``bfloat16`` or ``float32``; buffers keep theirs.
        fp8: the matrices of layers as block-FP8, like DeepSeek-V3's own checkpoint.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        tokenizer: ``byte`` or a directory whose tokenizer files are copied; None: those of hf_path.
        overwrite: replace a checkpoint directory that is there.
        check: called on every rank with the finished directory before it gets its name.

    Raises:
        ConfigError: ``fp8`` of a family that has no such checkpoints, or another dtype.
        CheckpointError: on every rank alike: the directory exists or cannot be written, or what
            ``check`` raised. Nothing is left under ``path`` then, and an older export stays.
    """
    parts, path = as_parts(parts), Path(path).expanduser().absolute()
    config = config_of(parts)
    folder = working_folder(path)
    quantization = fp8_config(config) if fp8 else None
    out_dtype = export_dtype(dtype)
    try:
        on_first_rank(lambda: prepare_folder(path, overwrite))
        plan = plan_outgoing(parts, family_of(config).keys, out_dtype, fp8=fp8)
        written = _write_tensors(plan, folder, max_shard_bytes)
        numbers = str(next(out.dtype for out in plan if out.shard.trained)).removeprefix("torch.")
        on_first_rank(lambda: write_beside(folder, config, numbers, tokenizer, quantization))
        if check is not None:
            on_every_rank(lambda: check(folder))
        on_first_rank(lambda: commit_folder(path))
    except AutomoeError:
        if is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return replace(written, path=path)


# Tensors ------------------------------------------------------------------------------------------


def _write_tensors(plan: list[Outgoing], folder: Path, max_shard_bytes: int) -> Written:
    rank = dist.get_rank() if dist.is_initialized() else 0
    bins = split((out.item for out in plan if out.writer == rank), max_shard_bytes)
    keys = [[entry.key for item in one for entry in item] for one in bins]
    num_bytes = sum(entry.num_bytes for one in bins for item in one for entry in item)
    ranks = _all_gather((keys, num_bytes))
    names = file_names(sum(len(theirs) for theirs, _ in ranks))
    first = sum(len(theirs) for theirs, _ in ranks[:rank])
    files = [folder / name for name in names[first : first + len(bins)]]
    _stream(plan, rank, FilesWriter(list(zip(files, bins, strict=True))))
    all_bins = [one for theirs, _ in ranks for one in theirs]
    weight_map = {key: name for name, one in zip(names, all_bins, strict=True) for key in one}
    total = sum(their_bytes for _, their_bytes in ranks)
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        on_first_rank(lambda: write_json(folder / INDEX_FILE, index))
    return Written(folder, len(weight_map), len(names), total)


def _all_gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _stream(plan: list[Outgoing], rank: int, files: FilesWriter) -> None:
    """Gather tensor after tensor; whoever writes one appends it to its file.

    A rank that cannot write any more still takes part in gathering, and says so at the end.
    """
    failure: CheckpointError | None = None
    for out in plan:
        if rank not in out.holders:
            continue
        with torch.no_grad():
            tensor = gather(out)
        if out.writer != rank or failure is not None:
            continue
        try:
            files.write(out.item, tensor)
        except CheckpointError as error:
            failure = error
    try:
        files.close()
    except CheckpointError as error:
        failure = failure or error
    raise_everywhere(failure)
