"""Folders of other programs that nobody reads as they are: named before ranks start, with a way out that exists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import automoe
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


def stacked(tensors: Tensors) -> Tensors:
    """As ``mlx_lm.convert`` 0.32.2 saves experts: those of a layer stacked, gates and ups apart, one set of names."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    made: Tensors = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for key, one in tensors.items():
        before, found, after = key.partition("experts.")
        if not found or "shared" in before:
            made[key] = one
            continue
        part = after.split(".")[1]
        experts.setdefault(f"{before}switch_mlp.{names.get(part, part)}.weight", []).append(one)
    return made | {key: torch.stack(matrices) for key, matrices in experts.items()}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral_odd", "qwen2_moe", "olmoe", "glm4_moe", "minimax_m2"])
def test_experts_that_mlx_lm_stacked_are_read(tmp_path: Path, name: str) -> None:
    save_small_hf(name, tmp_path / "published", dtype=torch.bfloat16)
    folder = rewritten(tmp_path / "mlx", name, stacked)
    assert any(".switch_mlp." in key for key in load_file(folder / "model.safetensors"))
    models = [automoe.from_hf(tmp_path / kind).state_dict() for kind in ("published", "mlx")]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(one, models[1][key]) for key, one in models[0].items())


def affine(tensors: Tensors) -> Tensors:
    """As mlx-lm quantizes a matrix: words, scales and biases."""
    [key, *_] = [key for key in tensors if key.endswith("q_proj.weight") or key.endswith("q_a_proj.weight")]
    rows, cols = tensors.pop(key).shape
    parts = {"biases": torch.zeros(rows, 1), "scales": torch.ones(rows, 1)}
    return (
        tensors
        | {key: torch.ones(rows, cols // 8, dtype=torch.uint32)}
        | {key.replace("weight", part): one.bfloat16() for part, one in parts.items()}
    )


def absorbed(tensors: Tensors) -> Tensors:
    """As mlx-lm splits ``kv_b_proj`` into a matrix of keys and one of values for each head."""
    made = {key: one for key, one in stacked(tensors).items() if "kv_b_proj" not in key}
    return made | {"model.layers.0.self_attn.embed_q.weight": torch.ones(4, 8, 8)}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gpt_oss", blocks, r"GPT-OSS that transformers 5\.23 saved .*Name the MXFP4 checkpoint itself"),
        ("gpt_oss", one_by_one, r"GPT-OSS of llm-compressor.* one by one.*Train the bfloat16 checkpoint"),
        ("mixtral", mixtral_of_llm_compressor, r"Mixtral of llm-compressor.*Train the bfloat16 checkpoint"),
        ("qwen3_moe", affine, r"quantized by mlx-lm\. Widen it first: mlx_lm\.convert --dequantize"),
        ("llama_plain", affine, r"quantized by mlx-lm\. Widen it first: mlx_lm\.convert --dequantize"),
        ("dsv3", absorbed, r"of mlx-lm, which splits kv_b_proj.*Train the checkpoint that it was converted from"),
        ("glm4_moe_lite", absorbed, r"of mlx-lm, which splits kv_b_proj.*Train the checkpoint"),
        ("qwen3_next", stacked, r"of mlx-lm, whose norms hold their weights plus one\. Train the checkpoint"),
    ],
)
def test_the_names_say_who_wrote_a_folder(tmp_path: Path, name: str, change: Any, says: str) -> None:
    folder = rewritten(tmp_path / "model", name, change)
    with pytest.raises(CheckpointError, match=says):
        model_config_from_hf(folder)
