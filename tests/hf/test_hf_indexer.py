"""Indexers in HuggingFace folders: what config.json may say, block-FP8, and modules for multi-token prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_mesh_cases import stored
from test_hf_mtp import with_modules

import automoe
from automoe.config.schema import Config, LoraConfig, ModelConfig, TrainConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.read import load_hf
from automoe.hf.write import to_hf
from automoe.model.params import model_params
from automoe.model.trainable import with_adapters
from tests.support.configurations import quick_model
from tests.support.hf_models import save_small_hf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_small_hf("glm_moe_dsa_shared", tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index_topk": 0}, "index_topk=0, and a query sees at least 1 key"),
        ({"index_topk": -3}, "index_topk=-3"),
        ({"index_n_heads": 0}, "index_n_heads=0"),
        ({"index_head_dim": 6}, "index_head_dim=6.*needs 8 or more"),
        ({"index_n_heads": 5}, "weights have other sizes|wq_b"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, r"index_shared_layers=\[0\]"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"q_lora_rank": None}, "GlmMoeDsaConfig of transformers refuses"),
    ],
)
def test_what_is_refused(source: Path, changes: dict[str, Any], said: str) -> None:
    hf = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(hf | changes))
    with pytest.raises((ConfigError, automoe.errors.CheckpointError), match=said):
        load_hf(automoe.from_hf(source), source)


def test_a_family_without_indexers_cannot_say_that_there_are_some() -> None:
    config = quick_model("small_dsv32")
    with pytest.raises(ConfigError, match=r"index_topk=32.*deepseek_v3 checkpoint can only have 0"):
        family_of(replace(config, family="deepseek_v3")).write_config(replace(config, family="deepseek_v3"))
    shared = replace(config, attention=replace(config.attention, index_shared_layers=[1]))
    with pytest.raises(ConfigError, match=r"index_shared_layers=\[1\].*deepseek_v32 checkpoint can only have"):
        family_of(shared).write_config(shared)


def test_eight_bits_spare_the_weights_of_heads(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    to_hf(model, tmp_path / "fp8", encoding="fp8")
    scaled = {key.removesuffix("_scale_inv") for key in stored(tmp_path / "fp8") if key.endswith("_scale_inv")}
    prefix = "model.layers.{}.self_attn.indexer."
    assert {prefix.format(layer) + name for layer in (0, 3) for name in ("wq_b.weight", "wk.weight")} <= scaled
    assert not any("weights_proj" in key or "k_norm" in key for key in scaled)
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {prefix.format(layer) + "weights_proj" for layer in (0, 3)} == {key for key in said if "indexer" in key}


def test_modules_for_multi_token_prediction_have_indexers(source: Path, tmp_path: Path) -> None:
    model = with_modules(source)
    assert to_hf(model, tmp_path / "modules").checked
    names = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    assert {f"model.layers.{layer}.self_attn.indexer.{name}" for layer in (4, 5) for name in names} <= stored(
        tmp_path / "modules"
    ).keys()
    again = with_modules(source)
    load_hf(again, tmp_path / "modules")
    assert all(torch.equal(ours, again.state_dict()[name]) for name, ours in model.state_dict().items())
    found = model_config_from_hf(tmp_path / "modules", mtp=True)
    assert (found.num_mtp_layers, found.attention.index_shared_layers) == (2, [1, 2])


def test_adapters_leave_indexers_alone(source: Path) -> None:
    model: ModelConfig = model_config_from_hf(source)
    config = Config(model=model, lora=LoraConfig(rank=4), train=TrainConfig(trainable=["layers.3.self_attn.indexer.*"]))
    params = [param for param in with_adapters(model_params(model), config) if ".indexer." in param.name]
    assert len(params) == 10 and not any(".lora." in param.name for param in params)
    assert {param.name.split(".")[1] for param in params if param.trained} == {"3"}
