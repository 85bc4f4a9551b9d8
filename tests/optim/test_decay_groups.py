"""Which parameters decay, of every family by name: matrices do, and nothing that shifts or scales one number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from automoe.config.schema import MoEConfig, OptimConfig
from automoe.hf.families.registry import model_config_from_hf
from automoe.optim.adamw import build_optimizer
from automoe.parallel.parallelize import build_decoder
from tests.support.hf_models import SMALL_MODELS, small_hf_model

DECAYS = re.compile(
    r"(embed_tokens|lm_head|(q|k|v|o|gate|up|down|output_gate)(_a|_b)?(_proj)?(_with_mqa)?|kv_[ab]_proj(_with_mqa)?"
    r"|router|conv1d|in_proj_(qkvz|ba|qkv|z|b|a)|out_proj)\.weight$|\.experts\.(gate_up|down)_proj$"
)
STAYS = re.compile(r"norm\.weight$|\.bias$|\.experts\.(gate_up|down)_proj_bias$|\.sinks$|\.A_log$|\.dt_bias$")


@pytest.mark.parametrize("name", ["dsv3", "qwen2_moe", "glm4_moe", "gpt_oss", "qwen3_next", "llama_odd", "mixtral"])
def test_every_parameter_by_name(name: str, tmp_path: Path) -> None:
    import torch

    assert name in SMALL_MODELS
    small_hf_model(name).config.save_pretrained(tmp_path)
    model = build_decoder(model_config_from_hf(tmp_path), MoEConfig(), torch.float32)
    optimizer = build_optimizer([model], OptimConfig(weight_decay=0.25))
    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["names"]}
    assert decay.keys() == dict(model.named_parameters()).keys()
    for parameter, value in decay.items():
        matrix, other = DECAYS.search(parameter), STAYS.search(parameter)
        assert bool(matrix) != bool(other), f"{parameter} is in both lists or in none"
        assert value == (0.25 if matrix else 0.0), parameter
    if name == "gpt_oss":
        assert sum("_proj_bias" in parameter for parameter in decay) == 2 * model.config.num_layers
