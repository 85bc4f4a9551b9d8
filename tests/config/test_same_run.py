"""Which configurations are one run, and the name of its folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automoe.config.compose import compose_config, folder_name
from automoe.config.convert import config_to_dict
from automoe.config.frozen import differences, goes_on
from automoe.config.schema import Config


@pytest.mark.parametrize(
    ("overrides", "run_dir"),
    [
        ([], "runs/default"),
        (["mesh.pp=1", "mesh.ep=4"], "runs/default-ep4-pp1"),
        (["mesh.ep=4", "mesh.pp=1"], "runs/default-ep4-pp1"),
        (["model=small_mixtral", "optim.lr=1e-3"], "runs/default-model-small_mixtral-lr1e-3"),
        (["parallel.recompute=[moe,mlp]"], "runs/default-recompute-moe-mlp"),
        (["launch.num_ranks=4", "observe=wandb", "checkpoint.every=5", "checkpoint.resume=never"], "runs/default"),
        (["mesh.ep=4", "run_dir=runs/mine"], "runs/mine"),
    ],
)
def test_a_run_is_named_after_what_was_typed(overrides: list[str], run_dir: str) -> None:
    assert compose_config(overrides=overrides).run_dir == run_dir


def test_names_differ_where_overrides_do() -> None:
    others = [
        ["data.path=a/b"], ["data.path=a-b"], ["data.path=a b"], ["data.path=a\udcff"], ["data.path=" + "x" * 200], ["data.path=" + "x" * 201],
        ["mesh.dp_shard=-1"], ["mesh.dp_shard=1"], ["moe.gate=a", "x.gate=b"], ["moe.gate=b", "x.gate=a"],
    ]  # fmt: skip
    names = [folder_name(overrides) for overrides in others]
    assert len(set(names)) == len(names)
    assert all(len(name) < 100 and "/" not in name and " " not in name for name in names)


def test_of_a_key_that_is_given_twice_the_last_counts() -> None:
    typed = ["optim.lr=3e-3", "optim.lr=1e-3"]
    assert folder_name(typed) == folder_name(typed[1:]) != folder_name(typed[:1])


def test_a_key_whose_value_is_a_mapping_is_compared_whole() -> None:
    config = Config()
    config.data.chat.keys = {"question": "user"}
    assert differences(config_to_dict(Config()), config) == {"data.chat.keys": (None, {"question": "user"})}


def test_what_makes_another_run_and_what_may_differ() -> None:
    before, config = config_to_dict(Config()), Config()
    del before["optim"]["moments"]  # written by a version that had no such key
    assert differences(before, config) == {}
    free = replace(
        config,
        run_dir="elsewhere",
        launch=replace(config.launch, timeout_s=5),
        checkpoint=replace(config.checkpoint, every=7, resume="never"),
    )
    assert differences(before, free) == {}
    other = replace(
        config,
        train=replace(config.train, steps=500, seed=1, micro_batch_size=1),
        mesh=replace(config.mesh, ep=2),
        checkpoint=replace(config.checkpoint, resume="runs/never"),
    )
    changed = differences(before, other)
    assert changed["train.seed"] == (0, 1) and changed["checkpoint.resume"] == ("auto", "runs/never")
    assert [key for key, both in changed.items() if not goes_on(key, *both)] == ["train.seed"]
    assert not goes_on("train.steps", 500, 200), "a run that ends earlier than it did is another"
