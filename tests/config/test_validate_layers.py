"""Rules of layers that differ and of biased experts: what is refused, with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.rules_model import model_rows
from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from tests.support.configurations import quick_config


def config(model: str = "small_gpt_oss", mesh: dict[str, int] | None = None, **keys: Any) -> Config:
    overrides = [f"model={model}", *(f"{key.replace('__', '.')}={value}" for key, value in keys.items())]
    return replace(quick_config(overrides=overrides), mesh=MeshConfig(**({"dp_shard": 1} | (mesh or {}))))


def next_config(**options: Any) -> Config:
    return config("small_qwen3_next", **options)


@pytest.mark.parametrize(
    ("make", "key", "needles"),
    [
        (
            partial(config, model__attention__full_attention_interval=0),
            "model.attention.full_attention_interval",
            ["1"],
        ),
        (
            partial(config, model__attention__sliding_window=0),
            "model.attention.full_attention_interval",
            ["sliding_window=0", "full_attention_interval=2"],
        ),
        (
            partial(config, model__attention__full_attention_interval=1),
            "model.attention.full_attention_interval",
            ["sliding_window=64"],
        ),
        (
            partial(config, "small_dsv3", model__attention__sinks=True),
            "model.attention.sinks",
            ["attention kind mla does not have it", "sinks=false"],
        ),
        (partial(next_config, mesh=dict(tp=3)), "mesh.tp", ["4 % 3 = 1", "mesh.tp=1"]),
        (
            partial(next_config, model__attention__linear_num_value_heads=6),
            "model.attention.linear_num_value_heads",
            ["6 % 4 = 2", "4 or 8"],
        ),
        (
            partial(next_config, model__attention__linear_key_head_dim=0),
            "model.attention.linear_key_head_dim",
            ["needs this size"],
        ),
        (
            partial(next_config, model__attention__sliding_window=8),
            "model.attention.full_attention_interval",
            ["linear_num_key_heads=4", "sliding_window=8"],
        ),
        (partial(config, model__swiglu_limit=0), "model.swiglu_limit", ["larger than 0"]),
        (partial(config, model__final_logit_softcapping=0.0), "model.final_logit_softcapping", ["softcapping=null"]),
        (partial(config, model__attention__multiplier=0.0), "model.attention.multiplier", ["multiplier=null"]),
        (
            partial(config, "small_dsv3", model__attention__multiplier=0.5),
            "model.attention.multiplier",
            ["only attention kind gqa"],
        ),
        (
            partial(config, mesh=dict(dp_shard=8, etp=4, ep_shard=2), model__hidden_size=180),
            "model.hidden_size",
            ["etp*ep_shard = 4*2 = 8", "180 % 8 = 4"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_is_named(make: Callable[[], Config], key: str, needles: list[str]) -> None:
    broken = make()  # not while tests are collected, which a machine without hydra does too
    shape = resolve_mesh(broken.mesh, None)
    with pytest.raises(ConfigError) as caught:
        check_rows(broken, chain(number_rows(broken), model_rows(broken, shape)), shape)
    assert caught.value.key == key
    for needle in needles:
        assert needle in str(caught.value)


@pytest.mark.parametrize("mesh", [dict(), dict(cp=2), dict(tp=2), dict(dp_shard=4, etp=2, ep_shard=2)])
def test_what_is_legal_passes(mesh: dict[str, int]) -> None:
    fine = config(mesh=mesh)
    assert validate(fine, None, "cpu") == resolve_mesh(fine.mesh, None)


@pytest.mark.parametrize("mesh", [dict(), dict(tp=2), dict(pp=2, dp_shard=2), dict(cp=4), dict(cp=2, tp=2)])
def test_delta_nets_pass(mesh: dict[str, int]) -> None:
    fine = next_config(mesh=mesh)
    assert validate(fine, None, "cpu") == resolve_mesh(fine.mesh, None)


def test_experts_without_biases_need_no_even_columns() -> None:
    plain = config("small_qwen3_moe", mesh=dict(dp_shard=8, etp=8), model__hidden_size=180)
    check_rows(plain, model_rows(plain, resolve_mesh(plain.mesh, None)))
