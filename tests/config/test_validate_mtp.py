"""Rules of multi-token prediction: what has no place for modules is refused by name, before ranks start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from automoe.config.mesh_shape import resolve_mesh, stage_layers
from automoe.config.recompute import recompute_rows
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.rules_model import model_rows
from automoe.config.schema import Config, LoraConfig, MeshConfig, ParallelConfig
from automoe.errors import ConfigError
from tests.support.configurations import quick_config


def config(depths: int = 1, model: dict[str, Any] | None = None, **sections: Any) -> Config:
    plain = quick_config(overrides=["model=small_dsv3"])
    return replace(plain, model=replace(plain.model, num_mtp_layers=depths, **(model or {})), **sections)


def check(one: Config) -> None:
    shape = resolve_mesh(MeshConfig(), 1)
    check_rows(one, number_rows(one))
    check_rows(one, model_rows(one, shape), shape)


@pytest.mark.parametrize(
    ("broken", "key", "said"),
    [
        (config(-1), "model.num_mtp_layers", "at least 0"),
        (config(model={"family": "mixtral"}), "model.num_mtp_layers", "deepseek_v3 and glm4_moe"),
        (config(model={"first_k_dense": 4}), "model.num_mtp_layers", "no layer of the model has"),
        (config(model={"upcycle": True, "hf_path": "x"}), "model.upcycle", "dense checkpoint"),
        (config(recipe="dpo"), "recipe", "cross-entropy"),
        (config(lora=LoraConfig(rank=4, export="adapter")), "lora.export", "no modules"),
        (config(0, train=replace(Config().train, mtp_loss_weight=0.1)), "train.mtp_loss_weight", "no modules"),
        (config(train=replace(Config().train, mtp_loss_weight=-1.0)), "train.mtp_loss_weight", "at least 0"),
        (config(train=replace(Config().train, loss="other")), "train.loss", "cross-entropy"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_what_has_no_modules_is_refused(broken: Config, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check(broken)
    assert error.value.key == key


def test_modules_are_layers_of_the_last_stage() -> None:
    one = config(2)
    check(one)
    assert one.model.num_moe_layers == one.model.num_layers - 1 + 2
    four = replace(one, mesh=MeshConfig(pp=2, dp_shard=1), parallel=ParallelConfig(layers_per_stage=[3, 1]))
    assert stage_layers(four, resolve_mesh(four.mesh, None)) == [range(0, 3), range(3, 6)]


def test_recomputed_layers_may_be_modules() -> None:
    named = replace(config(2), parallel=ParallelConfig(recompute="full", recompute_layers=[0, 5]))
    check_rows(named, recompute_rows(named))
    named.parallel.recompute_layers = [6]
    with pytest.raises(ConfigError, match=r"outside 0\.\.5 \(model.num_layers=4 and num_mtp_layers=2\)"):
        check_rows(named, recompute_rows(named))
