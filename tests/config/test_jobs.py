"""Defaults by job: what a run from a checkpoint takes, unless it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from automoe import cli
from automoe.config.compose import check_swept_values, compose_config, list_options
from automoe.config.convert import config_to_dict
from automoe.config.frozen import differences, goes_on
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.hf_models import save_small_hf

FROM = ["model.hf_path=DIR", "data=chat", "data.path=FILE"]


def taken(name: str, *overrides: str) -> tuple[float, float, float]:
    config = compose_config(name, list(overrides))
    return config.optim.lr, config.optim.weight_decay, config.train.epochs


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (1e-5, 0.0, 3.0)),
        (["lora.rank=8"], (2e-4, 0.0, 3.0)),
        (["data=preference", "recipe=dpo"], (5e-7, 0.0, 1.0)),
        (["data=preference", "lora.rank=8"], (5e-6, 0.0, 1.0)),
        (["data=jsonl"], (1e-5, 0.0, 3.0)),
        (["optim.lr=1e-4"], (1e-4, 0.0, 3.0)),
        (["optim={lr: 1e-4}"], (1e-4, 0.0, 3.0)),
        (["optim.weight_decay=0.1", "train.epochs=2"], (1e-5, 0.1, 2.0)),
        (["train.steps=300"], (1e-5, 0.0, 0.0)),
        (["train={steps: 7}"], (1e-5, 0.0, 0.0)),
        (["train.steps=300", "train.epochs=2"], (1e-5, 0.0, 2.0)),
        (["experiment=yarn"], (2e-5, 0.0, 0.0)),
        (["optim=adamw"], (3e-3, 0.1, 3.0)),
        (["optim=large"], (2.2e-4, 0.1, 3.0)),
        (["optim=muon", "optim.lr=1e-5"], (1e-5, 0.1, 3.0)),
        (["model.random_weights=true"], (3e-3, 0.1, 0.0)),
    ],
)
def test_a_checkpoint_takes_the_defaults_of_its_job(overrides: list[str], expected: tuple[float, ...]) -> None:
    assert taken("config", *FROM, *overrides) == expected


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in list_options() if not name.endswith("_g8t8")])
def test_every_shipped_configuration_tunes_a_checkpoint_and_trains_another_as_before(name: str) -> None:
    """By ``data.kind``, as a choice of the group ``data`` sets it: each file is composed once."""
    plain = compose_config(name)
    chats = [FROM[0], "data.kind=chat", FROM[2]]
    assert taken(name, *chats)[::2] == (2e-4 if plain.lora.rank else 1e-5, 3.0) or name.endswith(
        ("dpo", "grpo_small", "distill_small")
    )
    pairs = [FROM[0], "data.kind=preference", FROM[2], "recipe=dpo"]
    assert (
        name in ("grpo_small", "distill_small") or taken(name, *pairs)[2] == 1.0
    )  # whose recipe_args are another recipe's
    assert plain.train.epochs == 0.0 and plain.train.steps >= 40
    rate = {"dpo_small": 3e-4, "qwen3_30b_a3b_dpo": 5e-7, "gpt_oss_20b_lora": 2e-4}
    random = rate.get(name) or (1e-5 if name.endswith("_sft") else None)
    assert plain.optim.lr in ([random] if random else [3e-3, 2.2e-4])


def test_own_files_and_sweeps_take_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nmodel: {hf_path: DIR}\ntrain: {val_every: 0}\n")
    mine = compose_config("mine", ["data=chat", "data.path=FILE"], str(tmp_path))
    assert (mine.optim.lr, mine.train.epochs, mine.moe.seq_balance_coef) == (1e-5, 3.0, 0.0)
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nmodel: {hf_path: DIR}\ntrain: {steps: 200}\n")
    mine = compose_config("mine", ["data.kind=chat", "data.path=FILE"], str(tmp_path))
    assert (mine.optim.lr, mine.train.epochs, mine.train.steps) == (1e-5, 0.0, 200)
    check_swept_values("config", ["model.hf_path=A,null", "lora.rank=0,8", "data=chat", "data.path=FILE"], None)


def test_the_configuration_that_is_printed_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_hf("qwen3_moe", tmp_path / "hf", other_sizes={"vocab_size": 304})
    save_tokenizer(tmp_path / "hf", "chatml")
    write_chat(tmp_path / "chats.jsonl", [messages("2+2?", "4")])
    words = ["train", f"model.hf_path={tmp_path / 'hf'}", "data=chat", f"data.path={tmp_path / 'chats.jsonl'}"]
    assert cli.main([*words, "mesh=fsdp", "launch.num_ranks=1", "--print-config"]) == 0
    printed, note = capsys.readouterr()
    assert note.endswith("note: train.epochs=3 replaces train.steps=300 once the data is read\n")
    assert "\n  lr: 1.0e-05\n" in printed and "\n  epochs: 3.0\n" in printed and "by_job" not in printed


def test_a_run_of_epochs_goes_on_for_more_of_them() -> None:
    """The steps that an earlier start found in its data are no setting; more epochs, or steps instead, go on."""
    then = config_to_dict(compose_config(overrides=["train.epochs=2", "train.steps=12"]))
    for overrides, expected in (
        (["train.epochs=2"], {}),
        (["train.epochs=3"], {"train.epochs": (2.0, 3.0)}),
        (["train.steps=20"], {"train.epochs": (2.0, 0.0), "train.steps": (12, 20)}),
    ):
        changed = differences(then, compose_config(overrides=overrides))
        assert changed == expected and all(goes_on(key, *both) for key, both in changed.items())
    for overrides in (["train.epochs=1"], ["train.steps=8"]):
        changed = differences(then, compose_config(overrides=overrides))
        assert not all(goes_on(key, *both) for key, both in changed.items())
