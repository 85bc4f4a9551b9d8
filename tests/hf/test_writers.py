"""Folders of other programs that nobody reads as they are: named before ranks start, with a way out that exists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from automoe.errors import CheckpointError
from automoe.hf.families.registry import model_config_from_hf
from tests.support.hf_models import save_small_hf

Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, name: str, change: Callable[[Tensors], Tensors], **stated: Any) -> Path:
    """A small model of ``name`` whose tensors and configuration are changed."""
    save_small_hf(name, folder, dtype=torch.bfloat16)
    model_config_from_hf(folder)  # It is read as transformers saves it.
    [file] = folder.glob("*.safetensors")
    save_file({key: one.contiguous() for key, one in change(load_file(file)).items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | stated))
    return folder


def blocks(tensors: Tensors) -> Tensors:
    """As transformers 5.23.0 saves GPT-OSS that ``Mxfp4Config(dequantize=True)`` loaded."""
    return {key + "_blocks" * key.endswith(("gate_up_proj", "down_proj")): one for key, one in tensors.items()}


def one_by_one(tensors: Tensors) -> Tensors:
    """As llm-compressor 0.14.0 saves GPT-OSS, here without scales."""
    made = {}
    for key, one in tensors.items():
        before, found, what = key.partition("experts.")
        if not found:
            made[key] = one
            continue
        end = "bias" if what.endswith("_bias") else "weight"
        for number, matrix in enumerate(one):
            parts = {"down": matrix} if "down" in what else {"gate": matrix[..., ::2], "up": matrix[..., 1::2]}
            made |= {f"{before}experts.{number}.{part}_proj.{end}": it.clone() for part, it in parts.items()}
    return made


def mixtral_of_llm_compressor(tensors: Tensors) -> Tensors:
    parts = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    made = {}
    for key, one in tensors.items():
        for theirs, ours in parts.items():
            key = key.replace(theirs, ours)
        made[key] = one
    assert made.keys() != tensors.keys()
    return made


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gpt_oss", blocks, r"GPT-OSS that transformers 5\.23 saved .*Name the MXFP4 checkpoint itself"),
        ("gpt_oss", one_by_one, r"GPT-OSS of llm-compressor.* one by one.*Train the bfloat16 checkpoint"),
        ("mixtral", mixtral_of_llm_compressor, r"Mixtral of llm-compressor.*Train the bfloat16 checkpoint"),
    ],
)
def test_the_names_say_who_wrote_a_folder(tmp_path: Path, name: str, change: Any, says: str) -> None:
    folder = rewritten(tmp_path / "model", name, change)
    with pytest.raises(CheckpointError, match=says):
        model_config_from_hf(folder)
