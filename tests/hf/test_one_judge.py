"""A quantized folder that nobody can decode: every reader refuses it, in the same words and before it reads weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora_export import LORA, trained

import automoe
from automoe import cli
from automoe.config.frozen import save_config
from automoe.config.schema import Config
from automoe.errors import CheckpointError
from automoe.hf.families.registry import check_model, model_config_from_hf
from automoe.hf.peft import to_peft
from tests.support.chat import save_tokenizer
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf
from tests.support.wrappers import INDEX, save_wrapper

Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

NO_GROUPS = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}


def other_shape(tensors: Tensors, matrix: str) -> None:
    tensors[matrix] = torch.zeros(256, 64).to(torch.float8_e4m3fn)
    tensors[f"{matrix}_scale_inv"] = torch.ones(1, 2)


def packed(tensors: Tensors, matrix: str) -> None:
    """As bitsandbytes saves a matrix."""
    del tensors[f"{matrix}_scale_inv"]
    tensors[matrix] = torch.zeros(tensors[matrix].numel() // 2, 1, dtype=torch.uint8)
    tensors[f"{matrix}.absmax"] = torch.ones(64)


def nothing(tensors: Tensors, matrix: str) -> None:
    pass


DAMAGES: dict[str, tuple[object, Callable[[Tensors, str], object], str]] = {
    "no quantization_config": (None, nothing, "quantized .*no quantization_config that says how"),
    "another method": ({"quant_method": "mxfp4"}, nothing, "their scales are missing"),
    "an unknown method": ({"quant_method": "gptq", "bits": 4}, nothing, "quant_method=gptq"),
    "a form without groups": (NO_GROUPS, nothing, r"groups with format, type and num_bits of \[\]"),
    "a method without its blocks": ({"quant_method": "fp8"}, nothing, "weight_block_size=None"),
    "scales of another shape": (FP8, other_shape, r"needs scales \[2, 1\]"),
    "scales for other blocks": (FP8 | {"weight_block_size": [16, 16]}, nothing, "needs scales"),
    "integers as scales": (
        FP8,
        lambda tensors, matrix: tensors.update({f"{matrix}_scale_inv": torch.ones(1, 1, dtype=torch.int32)}),
        "I32, and fp8 needs scales",
    ),
    "no scales": (FP8, lambda tensors, matrix: tensors.pop(f"{matrix}_scale_inv"), "their scales are missing"),
    "bitsandbytes": (None, packed, "quantized"),
    "bitsandbytes, stated": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, packed, "=bitsandbytes"),
}


def damage_it(folder: Path, damage: str) -> str:
    """Damage one matrix of a folder; return the words of the refusal."""
    stated, change, words = DAMAGES[damage]
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        matrix = next((name for name in tensors if name.endswith("self_attn.o_proj.weight")), None)
        if matrix is not None:
            break
    assert matrix is not None
    tensors[matrix] = tensors[matrix].to(torch.float8_e4m3fn)
    tensors[f"{matrix}_scale_inv"] = torch.ones(1, 1)
    change(tensors, matrix)
    save_file(tensors, file, {"format": "pt"})
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
        (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": stated} if stated else {})))
    return words


PAIRS = "train model.hf_path={} data=preference data.path=none.jsonl recipe=dpo"
COMMANDS = [
    "generate {} Who?",
    "eval {} --tasks letters.yaml",
    "train model.hf_path={} data=chat data.path=none.jsonl",
    PAIRS,
    f"{PAIRS} lora.rank=2",
    "convert {} --out no",
    "plan model.hf_path={}",
    "verify model.hf_path={}",
]
UPCYCLE = (
    "train model.hf_path={} model.upcycle=true model.num_experts=4 model.num_experts_per_token=2 data=chat data.path=x"
)
DENSE = ["upcycle {} --out no --experts 4 --top-k 2", f"{UPCYCLE} model.moe_intermediate_size=48"]
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
"""


@pytest.mark.one_in(9)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe", "llama_plain", "flex_olmo"])
def test_every_reader_refuses_it(
    kind: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    {"qwen3_5_moe": save_wrapper, "flex_olmo": save_class}.get(kind, save_small_hf)(kind, folder)
    (tmp_path / "letters.yaml").write_text(TASK)
    (tmp_path / "letters.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    words = damage_it(folder, damage)
    readers: list[Callable[[], object]] = [lambda: check_model(folder), lambda: model_config_from_hf(folder)]
    readers += [lambda: automoe.from_hf(folder)] if kind != "flex_olmo" else []
    for reader in readers:
        with pytest.raises(CheckpointError, match=words):
            reader()
    capsys.readouterr()  # what saving printed
    said = set()
    for command in COMMANDS + DENSE * (kind == "llama_plain"):
        assert cli.main(command.format(folder).split()) == 2, command
        said.add(capsys.readouterr().err.splitlines()[-1])
    assert len(said) == 1 and str(folder) in next(iter(said)), said


def test_a_family_that_nobody_knows_is_named_as_its_writers(tmp_path: Path) -> None:
    """``transformers`` may have it, and reads codes as if they were weights."""
    (tmp_path / "config.json").write_text('{"model_type": "nobodys", "num_hidden_layers": 1}')
    name = "model.layers.0.mlp.down_proj"
    codes = {f"{name}.weight": torch.zeros(4, 4, dtype=torch.uint32), f"{name}.biases": torch.zeros(4, 1)}
    save_file(codes, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="quantized by mlx-lm. Widen it first"):
        check_model(tmp_path)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_base_of_adapters_is_judged_by_the_same(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters stand in a run beside a base that somebody damaged later; both ways to export them ask the judge."""
    folder, run_dir, out = tmp_path / "hf", tmp_path / "run", tmp_path / "out"
    save_small_hf("qwen3_moe", folder, other_sizes={"vocab_size": 304})
    save_tokenizer(folder, "chatml")
    lora = replace(LORA, export="adapter")
    model = trained(folder, lora)
    to_peft(model, run_dir / "adapter", lora)
    save_config(Config(run_dir=str(run_dir), model=replace(model.config, hf_path=str(folder)), lora=lora), run_dir)
    damage_it(folder, damage)
    capsys.readouterr()
    said = set()
    for words in (["plan", f"model.hf_path={folder}"], ["export", str(run_dir)], ["export", str(run_dir), "--adapter"]):
        assert cli.main([*words, *(["--out", str(out)] if words[0] == "export" else [])]) == 2
        said.add(capsys.readouterr().err.splitlines()[-1])
    assert len(said) == 1 and str(folder) in next(iter(said)), said
