"""Rules on streams of the residual and on tables of token ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.errors import ConfigError
from tests.support.configurations import quick_config

RANKS = ["mesh.pp=1", "mesh.ep=1", "mesh.dp_shard=1"]


def config_with(preset: str = "small_dsv4", **model: Any) -> Config:
    config = quick_config(overrides=[f"model={preset}", *RANKS])
    router = {key: model.pop(key) for key in ("num_hash_layers",) if key in model}
    return replace(config, model=replace(config.model, router=replace(config.model.router, **router), **model))


@pytest.mark.parametrize(
    ("model", "key", "rule"),
    [
        (dict(hc_mult=0), "model.hc_mult", "have hyper-connections"),
        (dict(hc_mult=2, residual_multiplier=0.5), "model.residual_multiplier", "weight what a block adds"),
        (dict(preset="small_dsv3", hc_mult=2, num_mtp_layers=1), "model.hc_mult", "read one stream of the residual"),
        (dict(hc_eps=-0.1), "model.hc_eps", "at least 0"),
        (dict(preset="small_dsv3", hc_mult=-1), "model.hc_mult", "at least 0"),
        (dict(hc_sinkhorn_iters=0), "model.hc_sinkhorn_iters", "at least 1"),
        (dict(hidden_act="relu"), "model.hidden_act", "in every FFN and expert"),
        (dict(plain_final_norm=True), "model.plain_final_norm", "by their weights alone"),
        (dict(num_hash_layers=-1), "model.router.num_hash_layers", "at least 0"),
        (dict(num_hash_layers=5), "model.router.num_hash_layers", "there are 4 layers with experts"),
    ],
)
def test_streams_and_tables_that_no_model_has_are_refused(model: dict[str, Any], key: str, rule: str) -> None:
    validate(config_with(model.get("preset", "small_dsv4")), 1, "cpu")
    with pytest.raises(ConfigError, match=rule) as caught:
        validate(config_with(**model), 1, "cpu")
    assert caught.value.key == key


def test_compiled_layers_have_no_streams() -> None:
    config = config_with("small_qwen3_moe", hc_mult=2)
    validate(config, 1, "cpu")
    with pytest.raises(ConfigError, match="hyper-connections with their weights in float32"):
        validate(replace(config, train=replace(config.train, compile=True)), 1, "cpu")
