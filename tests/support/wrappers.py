"""Small checkpoints of wrappers: a text model with a vision tower and modules for multi-token prediction beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.class_models import hf_class_config
from tests.support.hf_models import PUBLISHED_FUSED

PROCESSOR = {"preprocessor_config.json": {"patch_size": 16}, "video_preprocessor_config.json": {"fps": 2}}
INDEX = "model.safetensors.index.json"


def save_wrapper(model_type: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Save a wrapper as published: several files, vision and text in one of them, ``mtp.*``, a processor's files."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(1)
    config = hf_class_config(model_type, **more)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="60KB", save_original_format=model_type not in PUBLISHED_FUSED)
    if model_type == "kimi_k25":  # transformers' renaming of vision's blocks, undone, takes text layers for blocks too
        rename(folder, lambda key: key.replace("language_model.model.blocks.", "language_model.model.layers."))
    first = "model-00001-of-" + sorted(folder.glob("*.safetensors"))[-1].name.rpartition("-")[2]
    mtp = {"mtp.fc.weight": torch.randn(32, 64).to(dtype), "mtp.norm.weight": torch.randn(32).to(dtype)}
    save_file(load_file(folder / first) | mtp, folder / first, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(mtp, first)
    (folder / INDEX).write_text(json.dumps(index))
    for name, content in PROCESSOR.items():
        (folder / name).write_text(json.dumps(content))
    return model


def rename(folder: Path, change: Callable[[str], str | None]) -> None:
    """Rename tensors in files and index; None: remove."""
    index = json.loads((folder / INDEX).read_text())
    weight_map = {}
    for file in sorted(folder.glob("*.safetensors")):
        kept = {new: one for key, one in load_file(file).items() if (new := change(key)) is not None}
        save_file(kept, file, {"format": "pt"})
        weight_map |= dict.fromkeys(kept, file.name)
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder, by their names in its files."""
    return {key: one for file in folder.glob("*.safetensors") for key, one in load_file(file).items()}
