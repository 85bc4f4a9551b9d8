"""A model on any mesh written as a HuggingFace checkpoint directory, all of it or nothing.

Every rank streams the tensors that it was given to write into files of its own; what is gathered at
once is one tensor of the checkpoint. The directory gets its name when everything is on disk and checked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from automoe.config.schema import Config, ModelConfig
from automoe.errors import AutomoeError, CheckpointError
from automoe.hf.files import INDEX_FILE, SINGLE_FILE, check_target
from automoe.hf.gather import Outgoing, gather, plan_outgoing
from automoe.hf.reader import config_of
from automoe.hf.registry import family_of, read_hf_config
from automoe.hf.shards import DTYPES, Parts, as_parts, is_first_rank, raise_everywhere
from automoe.hf.verifier import verify_hf
from automoe.model.decoder import Decoder

_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Written:
    """What was written, and how it was found equal.

    Attributes:
        num_tensors, num_files, num_bytes: sizes of the whole checkpoint.
        checked: compared with the live weights and with transformers.
        logits_error: relative difference to transformers' logits; None for a model too large to be run
            twice, and on ranks other than the first.
    """

    path: Path
    num_tensors: int
    num_files: int
    num_bytes: int
    checked: bool = False
    logits_error: float | None = None

    def __str__(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        text = f"{self.path} ({self.num_tensors:,} tensors, {self.num_bytes / 1e6:,.1f} MB in {files}"
        if self.checked:
            text += "; equal bit for bit to the weights"
        if self.logits_error is not None:
            text += f", logits to transformers' within {self.logits_error:.0e}"
        return f"{text})"


def export_and_verify(
    parts: Parts | Decoder,
    path: str | Path,
    config: Config,
    *,
    dtype: str = "keep",
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = True,
) -> Written:
    """Write a HuggingFace checkpoint of a run's model and prove it; only then it gets its name. Collective.

    Args:
        parts: this rank's pipeline stages.
        config: the run's configuration; its tokenizer goes with the weights.
        dtype, max_shard_bytes, overwrite: see ``save_hf``.

    Raises:
        CheckpointError: on every rank alike, when it could not be written or is not equal; nothing new
            is left under ``path`` then.
    """
    return export_model(
        parts,
        path,
        tokenizer=config.data.tokenizer,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def export_model(parts: Parts | Decoder, path: str | Path, *, dtype: str = "keep", **options: Any) -> Written:
    """``export_and_verify`` for a model without a run; ``options`` are those of ``save_hf``. Collective."""
    errors: list[float | None] = []
    written = save_hf(
        parts,
        path,
        dtype=dtype,
        check=lambda folder: errors.append(verify_hf(parts, folder, dtype=dtype)),
        **options,
    )
    return replace(written, checked=True, logits_error=errors[0])


def save_hf(
    parts: Parts | Decoder,
    path: str | Path,
    *,
    dtype: str = "keep",
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
        max_shard_bytes: largest file, unless one tensor alone is larger.
        tokenizer: ``byte`` or a directory whose tokenizer files are copied; None: those of hf_path.
        overwrite: replace a checkpoint directory that is there.
        check: called on every rank with the finished directory before it gets its name.

    Raises:
        CheckpointError: on every rank alike: the directory exists or cannot be written, or what
            ``check`` raised. Nothing is left under ``path`` then, and an older export stays.
    """
    parts, path = as_parts(parts), Path(path).expanduser().absolute()
    folder = path.with_name(f".{path.name}.tmp")
    try:
        _on_first_rank(lambda: _prepare(path, folder, overwrite))
        plan = plan_outgoing(parts, family_of(config_of(parts)).keys, DTYPES[dtype])
        written = _write_tensors(plan, folder, max_shard_bytes)
        _on_first_rank(lambda: _write_beside(folder, config_of(parts), plan, tokenizer))
        if check is not None:
            _on_every_rank(lambda: check(folder))
        _on_first_rank(lambda: _commit(folder, path))
    except AutomoeError:
        if is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return replace(written, path=path)


def _on_every_rank(action: Callable[[], Any]) -> None:
    """Run ``action``; if it failed anywhere, raise that error everywhere."""
    failure = None
    try:
        action()
    except CheckpointError as error:
        failure = error
    except AutomoeError as error:
        failure = CheckpointError(str(error))
    except OSError as error:
        failure = CheckpointError(f"{error.filename}: {error.strerror}. Make room or name another directory")
    raise_everywhere(failure)


def _on_first_rank(action: Callable[[], Any]) -> None:
    _on_every_rank(action if is_first_rank() else lambda: None)


def _prepare(path: Path, folder: Path, overwrite: bool) -> None:
    check_target(path, overwrite)
    if folder.exists():  # of an export that was killed
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _commit(folder: Path, path: Path) -> None:
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(folder, path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Tensors ------------------------------------------------------------------------------------------


def _write_tensors(plan: list[Outgoing], folder: Path, max_shard_bytes: int) -> Written:
    rank = dist.get_rank() if dist.is_initialized() else 0
    bins = _split([out for out in plan if out.writer == rank], max_shard_bytes)
    keys = [[out.piece.key for out in one] for one in bins]
    num_bytes = sum(out.num_bytes for one in bins for out in one)
    ranks = _all_gather((keys, num_bytes))
    num_files = sum(len(theirs) for theirs, _ in ranks)
    names = [
        f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" if num_files > 1 else SINGLE_FILE
        for i in range(num_files)
    ]
    first = sum(len(theirs) for theirs, _ in ranks[:rank])
    _stream(plan, rank, [folder / name for name in names[first : first + len(bins)]], bins)
    all_bins = [one for theirs, _ in ranks for one in theirs]
    weight_map = {key: name for name, one in zip(names, all_bins, strict=True) for key in one}
    total = sum(their_bytes for _, their_bytes in ranks)
    if num_files > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _on_first_rank(lambda: _write_json(folder / INDEX_FILE, index))
    return Written(folder, len(weight_map), num_files, total)


def _all_gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _split(mine: list[Outgoing], max_bytes: int) -> list[list[Outgoing]]:
    bins: list[list[Outgoing]] = []
    filled = 0
    for out in mine:
        if not bins or filled + out.num_bytes > max_bytes:
            bins.append([])
            filled = 0
        bins[-1].append(out)
        filled += out.num_bytes
    return bins


def _stream(plan: list[Outgoing], rank: int, files: list[Path], bins: list[list[Outgoing]]) -> None:
    """Gather tensor after tensor; whoever writes one appends it to its file.

    A rank that cannot write any more still takes part in gathering, and says so at the end.
    """
    failure: CheckpointError | None = None
    stream: BinaryIO | None = None
    starts = {id(one[0]): (file, one) for file, one in zip(files, bins, strict=True)}
    for out in plan:
        if rank not in out.holders:
            continue
        with torch.no_grad():
            tensor = gather(out)
        if out.writer != rank or failure is not None:
            continue
        try:
            if id(out) in starts:
                if stream is not None:
                    stream.close()
                file, one = starts[id(out)]
                stream = open(file, "wb")
                stream.write(_header(one))
            assert stream is not None
            stream.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        except OSError as error:
            failure = CheckpointError(
                f"{file}: {error.strerror} while {out.piece.key} was written. "
                "Make room or name another directory"
            )
    if stream is not None:
        stream.close()
    raise_everywhere(failure)


def _header(one: list[Outgoing]) -> bytes:
    """Length and JSON header of a safetensors file with these tensors, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for out in one:
        begin, end = end, end + out.num_bytes
        entries[out.piece.key] = {
            "dtype": _DTYPE_NAMES[out.dtype],
            "shape": list(out.piece.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # readers want the data aligned
    return len(text).to_bytes(8, "little") + text


# Files beside the weights -------------------------------------------------------------------------


def _write_beside(folder: Path, config: ModelConfig, plan: list[Outgoing], tokenizer: str | None) -> None:
    source = Path(config.hf_path).expanduser() if config.hf_path is not None else None
    base = read_hf_config(source) if source is not None else None
    hf = family_of(config).write_config(config, base)
    if base is None:
        hf |= _token_ids(tokenizer)
    hf["dtype"] = str(next(out.dtype for out in plan if out.shard.trained)).removeprefix("torch.")
    _write_json(folder / "config.json", hf)
    if source is not None and (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    else:
        ids = {key: hf.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / "generation_config.json", {"_from_model_config": True} | ids)
    texts = source if tokenizer in (None, "byte") else Path(str(tokenizer)).expanduser()
    if texts is not None:
        for name in _TOKENIZER_FILES:
            if (texts / name).is_file():
                shutil.copyfile(texts / name, folder / name)


def _token_ids(tokenizer: str | None) -> dict[str, int | None]:
    """Spelled out even where there are none: an absent key means the family's published ids."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    from automoe.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return {"bos_token_id": None, "eos_token_id": loaded.eos_id, "pad_token_id": loaded.pad_id}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
