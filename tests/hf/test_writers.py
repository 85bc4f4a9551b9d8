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


FLOAT8 = torch.float8_e4m3fn
MX = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
# As compressed-tensors 0.20.1 writes a matrix [32, 64]: suffix of the name -> dtype and shape, and what config.json says.
WRITTEN: dict[str, tuple[str, str, dict[str, tuple[torch.dtype, list[int]]], dict[str, Any]]] = {
    "NVFP4": (
        "NVFP4",
        "nvfp4-pack-quantized",
        {"_packed": (torch.uint8, [32, 32]), "_scale": (FLOAT8, [32, 4]), "_global_scale": (torch.float32, [1])},
        MX | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
    "MXFP4": (
        "MXFP4",
        "mxfp4-pack-quantized",
        {"_packed": (torch.uint8, [32, 32]), "_scale": (torch.uint8, [32, 2])},
        MX | {"num_bits": 4},
    ),
    "FP8_BLOCK": (
        "FP8",
        "float-quantized",
        {"": (FLOAT8, [32, 64]), "_scale": (torch.bfloat16, [1, 1])},
        MX | {"strategy": "block", "group_size": None, "block_structure": [128, 128]},
    ),
    "W8A8": (
        "INT8",
        "int-quantized",
        {"": (torch.int8, [32, 64]), "_scale": (torch.bfloat16, [32, 1])},
        MX | {"type": "int", "strategy": "channel", "group_size": None},
    ),
    "MXFP8": ("other codes", "mxfp8-quantized", {"": (FLOAT8, [32, 64]), "_scale": (torch.uint8, [32, 2])}, MX),
    "MXFP6A16": (
        "other codes",
        "mxfp6-pack-quantized",
        {"_packed": (torch.uint8, [32, 48]), "_scale": (torch.uint8, [32, 2])},
        MX | {"num_bits": 6},
    ),
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("scheme", WRITTEN)
def test_formats_of_compressed_tensors_are_named(tmp_path: Path, scheme: str, mixed: bool) -> None:
    """Codes and settings as written; ``mixed``: of two groups, whose formats stand in the groups alone."""
    what, form, codes, weights = WRITTEN[scheme]
    matrix = "model.layers.0.self_attn.q_proj.weight"

    def quantized(tensors: Tensors) -> Tensors:
        made = {matrix + end: torch.ones(shape).to(dtype) for end, (dtype, shape) in codes.items()}
        return {key: one for key, one in tensors.items() if key != matrix} | made

    group = {"format": form, "targets": ["Linear"], "input_activations": None, "output_activations": None}
    group["weights"] = {"symmetric": True, "dynamic": False, **weights}
    stated = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if mixed else form,
        "config_groups": {"group_0": group} | ({"group_1": group | {"targets": ["re:.*v_proj$"]}} if mixed else {}),
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }
    folder = rewritten(tmp_path / "model", "llama_plain", quantized, quantization_config=stated)
    with pytest.raises(
        CheckpointError, match=rf'{what} of compressed-tensors: .*Train the bfloat16 .*"format": "{form}"'
    ):
        model_config_from_hf(folder)
