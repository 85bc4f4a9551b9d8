"""A checkpoint directory made under another name and renamed when it is complete, and its files other than weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automoe.config.schema import ModelConfig
from automoe.data.tokenizer import ByteTokenizer, load_tokenizer
from automoe.errors import AutomoeError, CheckpointError, ConfigError
from automoe.hf.families.family import HFConfig
from automoe.hf.families.registry import family_of, read_hf_config
from automoe.hf.keys import KeyMap, fp8_config

if TYPE_CHECKING:
    import torch

    from automoe.checkpoint.agreement import Ranks

_TOKENIZER_FILES = (  # patterns
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "tokenization_*.py",  # Kimi's and Moonlight's own, which tokenizer_config.json names
    "chat_template.jinja",
    "chat_template.json",
)


def check_target(path: Path, overwrite: bool) -> None:
    """Raise ``CheckpointError`` where an export may not be written to ``path``; makes nothing."""
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists. Name another directory, or overwrite it (--overwrite)")
    if path.exists() and not (path / "config.json").is_file() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is no checkpoint directory, so it is not replaced. Name another one")


def check_conversion(config: ModelConfig, path: Path, *, fp8: bool, layout: str, overwrite: bool) -> KeyMap:
    """The layout to convert to; raises ``ConfigError`` or ``CheckpointError`` where ``convert_hf`` would have to."""
    check_target(path, overwrite)
    if layout not in ("published", "fused"):
        raise ConfigError("--layout", layout, "must be published or fused", "Use published")
    if fp8 and layout == "fused":
        rule = "block-FP8 stores every expert's matrices"
        raise ConfigError("--fp8", "with --layout fused", rule, "Leave one of them out")
    keys = family_of(config).keys
    if fp8:
        fp8_config(config, keys)
    return keys.in_memory if layout == "fused" else keys


@contextmanager
def new_folder(path: Path, overwrite: bool, ranks: Ranks) -> Iterator[Path]:
    """An empty working folder, which gets its name at the end; all of that or nothing. Collective.

    Raises:
        CheckpointError: ``path`` may not be written, or the disk takes no more; like what is raised meanwhile, it
            leaves nothing new under ``path``.
    """
    folder = path.with_name(f".{path.name}.tmp")
    try:
        ranks.lead(lambda: _prepare(folder, path, overwrite))
        yield folder
        ranks.lead(lambda: _commit(folder, path))
    except (AutomoeError, OSError) as error:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            reason = f"{error.filename or path}: {error.strerror}"
            raise CheckpointError(f"{reason}. Make room or name another directory") from error
        raise


def _prepare(folder: Path, path: Path, overwrite: bool) -> None:
    check_target(path, overwrite)
    if folder.exists():  # of an export that was killed
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _commit(folder: Path, path: Path) -> None:
    """Everything in the working folder onto the disk, then its name; what was there before goes last."""
    from automoe.checkpoint.files import flush

    for file in folder.iterdir():
        flush(file)
    flush(folder)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(folder, path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_settings(
    folder: Path, config: ModelConfig, dtype: torch.dtype, tokenizer: str | None, quantization: HFConfig | None = None
) -> None:
    """config.json, generation_config.json and the tokenizer's files.

    Args:
        dtype: of the parameters.
        tokenizer: that trained it, ``byte`` or a directory; None: that of ``config.hf_path``.
        quantization: ``quantization_config`` of the written config.json.
    """
    source = Path(config.hf_path).expanduser() if config.hf_path is not None else None
    base = read_hf_config(source) if source is not None else None
    hf = family_of(config).write_config(config, base)
    # Another tokenizer's end of text is not the source's, and neither are settings of generation that name it.
    own = tokenizer is None or (source is not None and Path(tokenizer).expanduser().absolute() == source.absolute())
    if base is None or not own:
        hf |= _token_ids(tokenizer)
    hf["dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        hf["quantization_config"] = quantization
    _write_json(folder / "config.json", hf)
    if source is not None and own and (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    else:
        ids = {key: hf.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / "generation_config.json", {"_from_model_config": True} | ids)
    if tokenizer == "byte":
        for name, content in ByteTokenizer.files().items():
            (folder / name).write_text(content)
        return
    tokenizer_dir = source if own else Path(str(tokenizer)).expanduser()
    for pattern in _TOKENIZER_FILES:
        for file in tokenizer_dir.glob(pattern) if tokenizer_dir is not None else ():
            shutil.copyfile(file, folder / file.name)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _token_ids(tokenizer: str | None) -> dict[str, int | None]:
    """Spelled out even where there are none: an absent key means the family's published ids."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    loaded = load_tokenizer(tokenizer)
    return {"bos_token_id": None, "eos_token_id": loaded.eos_id, "pad_token_id": loaded.pad_id}
