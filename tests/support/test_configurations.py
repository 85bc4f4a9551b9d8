"""A configuration composed in part from the last one is that of ``compose_config``."""

from __future__ import annotations

from unittest.mock import patch

import hydra
import pytest

from automoe.config.compose import compose_config, list_options
from automoe.errors import ConfigError
from tests.support import configurations
from tests.support.configurations import quick_compose, quick_config, quick_model


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("config_name", "overrides"),
    [
        ("config", []),
        ("config", ["mesh=fsdp", "train.steps=7", "optim.lr=1e-4", "run_dir=/tmp/here"]),
        ("config", ["optim.lr=1e-4", "mesh=fsdp", "model=small_mixtral", "train.dtype=float64"]),
        ("dsv3_671b", ["mesh.pp=8", "moe.dispatcher=hierarchical"]),
        ("sft_small", ["data.chat.template_args={enable_thinking: false, n: 3}", "lora.rank=4", "train.steps=7"]),
        ("dpo_small", ["recipe_args.beta=0.3"]),
        ("config", ["model.hf_path=DIR", "data=chat", "data.path='a=b c'", "optim={lr: 1e-4}", "optim=muon"]),
        ("config", ["train.epochs=2", "experiment=smoke", "train={steps: 7}", "observe.samples=['<b>def ','x']"]),
    ],
)
def test_the_same_as_hydra(config_name: str, overrides: list[str]) -> None:
    quick_config(config_name)  # whose composition the second call may not change
    of_hydra = compose_config(config_name, overrides), compose_config(config_name)
    assert quick_config(config_name, overrides) == quick_config(config_name, overrides) == of_hydra[0]
    assert quick_config(config_name) == of_hydra[1]
    configurations._groups_composed.cache_clear()  # as another process begins, which reads what this one kept
    assert configurations._kept().is_dir()
    assert (quick_config(config_name, overrides), quick_config(config_name)) == of_hydra
    with patch.object(hydra, "compose", quick_compose):
        composed = compose_config(config_name, overrides), compose_config(config_name)
    assert composed == of_hydra


@pytest.mark.parametrize("wrong", ["train.stepz=3", "mesh=none_such", "train.steps=much", "train.steps=[1"])
def test_the_same_errors(wrong: str) -> None:
    with pytest.raises(ConfigError) as hydras:
        compose_config(overrides=[wrong])
    with pytest.raises(ConfigError) as own:
        quick_config(overrides=[wrong])
    with patch.object(hydra, "compose", quick_compose), pytest.raises(ConfigError) as quick:
        compose_config(overrides=[wrong])
    assert str(own.value) == str(hydras.value) == str(quick.value)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", list_options("model"))
def test_the_same_model_as_hydra(name: str) -> None:
    assert quick_model(name) == compose_config(overrides=[f"model={name}"]).model
