"""A quantized folder that nobody can decode: every reader refuses it, in the same words and before it reads weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import automoe
from automoe import cli
from automoe.errors import CheckpointError
from automoe.hf.families.registry import check_model, model_config_from_hf
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf

Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MATRIX = "model.layers.0.self_attn.o_proj.weight"


def other_shape(tensors: Tensors) -> None:
    tensors[MATRIX] = torch.zeros(256, 64).to(torch.float8_e4m3fn)
    tensors[f"{MATRIX}_scale_inv"] = torch.ones(1, 2)


def packed(tensors: Tensors) -> None:
    """As bitsandbytes saves a matrix."""
    del tensors[f"{MATRIX}_scale_inv"]
    tensors[MATRIX] = torch.zeros(tensors[MATRIX].numel() // 2, 1, dtype=torch.uint8)
    tensors[f"{MATRIX}.absmax"] = torch.ones(64)


DAMAGES: dict[str, tuple[object, Callable[[Tensors], object], str]] = {
    "no quantization_config": (None, lambda _: None, "quantized .*no quantization_config that says how"),
    "another method": ({"quant_method": "mxfp4"}, lambda _: None, "their scales are missing"),
    "an unknown method": ({"quant_method": "gptq", "bits": 4}, lambda _: None, "quant_method=gptq"),
    "a method without its blocks": ({"quant_method": "fp8"}, lambda _: None, "weight_block_size=None"),
    "scales of another shape": (FP8, other_shape, r"needs scales \[2, 1\]"),
    "scales for other blocks": (FP8 | {"weight_block_size": [16, 16]}, lambda _: None, "needs scales"),
    "integers as scales": (
        FP8,
        lambda tensors: tensors.update({f"{MATRIX}_scale_inv": torch.ones(1, 1, dtype=torch.int32)}),
        "I32, and fp8 needs scales",
    ),
    "no scales": (FP8, lambda tensors: tensors.pop(f"{MATRIX}_scale_inv"), "their scales are missing"),
    "bitsandbytes": (None, packed, "quantized"),
    "bitsandbytes, stated": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, packed, "=bitsandbytes"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "flex_olmo"])
def test_every_reader_refuses_it(kind: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated, change, words = DAMAGES[damage]
    folder = tmp_path / "hf"
    save_small_hf(kind, folder) if kind == "qwen3_moe" else save_class(kind, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[MATRIX] = tensors[MATRIX].to(torch.float8_e4m3fn)
    tensors[f"{MATRIX}_scale_inv"] = torch.ones(1, 1)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": stated} if stated else {})))
    readers: list[Callable[[], object]] = [lambda: check_model(folder), lambda: model_config_from_hf(folder)]
    readers += [lambda: automoe.from_hf(folder)] if kind == "qwen3_moe" else []
    for reader in readers:
        with pytest.raises(CheckpointError, match=words):
            reader()
    capsys.readouterr()  # what saving printed
    said = set()
    for command in ("generate {} Who?", "train model.hf_path={} data=chat data.path=none.jsonl", "convert {} --out no",
                    "plan model.hf_path={}", "verify model.hf_path={}"):  # fmt: skip
        words_of = command.format(folder).split()
        assert cli.main(words_of) == 2, command
        said.add(capsys.readouterr().err)
    assert len(said) == 1 and str(folder) in next(iter(said)), said
