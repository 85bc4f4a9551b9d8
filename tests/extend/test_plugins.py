"""What docs/architecture.md says can be added from outside the package, really added: ``tests/extend/house``."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import automoe
from automoe.config import plugins
from automoe.config.compose import compose_config
from automoe.config.frozen import load_config
from automoe.config.plugins import register
from automoe.errors import ConfigError
from automoe.hf.families.registry import known_families

HERE = Path(__file__).parent
TINY = ["train.steps=3", "train.seq_len=32", "train.global_batch_size=4", "train.val_every=0", "observe.report=false"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    with (folder / "lines.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "body"])
        rows.writerows([i, f"line {i} of a text, said {'again and ' * (i % 5)}again"] for i in range(200))
    return folder


def run(folder: Path, *words: str) -> list[dict]:
    """Train by the command that a user types, with the package ``house`` in the working directory."""
    path = os.pathsep.join([str(HERE), str(Path(automoe.__file__).parents[1])])
    command = [sys.executable, "-m", "automoe.train", *TINY, *words, f"run_dir={folder}"]
    done = subprocess.run(command, cwd=HERE, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = folder / "metrics.jsonl"  # which a recipe of one's own may leave out
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_a_run_with_everything_from_outside_equals_one_with_what_is_built_in(texts: Path, tmp_path: Path) -> None:
    """Same numbers from the package's data source, loss, expert backend and dispatcher as from automoe's own."""
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"body": row["body"]}) + "\n" for row in csv.DictReader((texts / "lines.csv").open()))
    )
    common = [
        "train.steps=2",
        "train.dtype=float64",
        "mesh.pp=1",
        "mesh.ep=2",
        "launch.num_ranks=2",
        "data.text_key=body",
    ]
    own = run(tmp_path / "own", *common, "data.kind=jsonl", f"data.path={tmp_path}/lines.jsonl", "moe.experts=loop")
    theirs = run(
        tmp_path / "theirs",
        *common,
        "plugins=[house]",
        "data.kind=csv",
        f"data.path={texts}",
        "moe.experts=bmm",
        "moe.dispatcher=ring",
        "train.loss=plain",
    )
    for mine, other in zip(own, theirs, strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], rel=1e-12)
        assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-10)
        assert other["unsure"] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"no reason to import code.*--plugins house"):
        load_config(tmp_path / "theirs")  # as `automoe export` does


@pytest.mark.exhaustive
def test_a_recipe_from_outside_trains_as_the_shipped_one(texts: Path, tmp_path: Path) -> None:
    words = ["mesh.pp=1", "mesh.ep=2", "launch.num_ranks=2", "data.kind=text", f"data.path={texts}"]
    shipped = run(tmp_path / "shipped", *words, "checkpoint.export_hf=false")
    run(tmp_path / "own", *words, "recipe=my_recipe.py")
    losses = [float(line) for line in (tmp_path / "own" / "losses.txt").read_text().splitlines()]
    assert losses == [record["loss"] for record in shipped]


def test_a_family_from_outside_is_read_and_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(plugins, "_registered", {key: {} for key in plugins.KINDS})
    monkeypatch.delitem(sys.modules, "house", raising=False)
    plugins.load_plugins(["house"])
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 12}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2}
    sizes |= {"topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None}
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("dots1", **sizes)).eval()
    for name, buffer in hf.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    hf.save_pretrained(tmp_path / "hf")
    model = automoe.from_hf(tmp_path / "hf")
    tokens = torch.randint(96, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf(tokens).logits, rtol=1e-4, atol=1e-5)
    automoe.to_hf(model, tmp_path / "again")  # compared with transformers before it is called written
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["model_type"] == "dots1"


@pytest.mark.parametrize(
    ("key", "name", "rule"),
    [("moe.experts", "loop", "taken by automoe itself"), ("optim.lr", "mine", "nothing can be registered")],
)
def test_names_that_cannot_be_registered(key: str, name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        register(key, name, object())


def test_two_packages_cannot_register_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {key: {} for key in plugins.KINDS})
    register("moe.experts", "mine", "a:b")
    register("moe.experts", "mine", "a:b")
    with pytest.raises(ConfigError, match="registered already"):
        register("moe.experts", "mine", "c:d")


def test_a_name_stays_registered_after_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {key: {} for key in plugins.KINDS})
    register("moe.experts", "mine", "math:sqrt")
    assert plugins.registered("moe.experts")["mine"](4) == 2
    register("moe.experts", "mine", "math:sqrt")


def test_a_family_is_registered_under_its_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {key: {} for key in plugins.KINDS})
    monkeypatch.syspath_prepend(HERE)
    register("model.family", "dots", "house.dots1:FAMILY")
    with pytest.raises(ConfigError, match="model_type=dots1"):
        known_families()


def test_a_plugin_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="no_such_package"):
        compose_config(overrides=["plugins=[no_such_package]"])


def test_names_of_plugins_are_refused_where_the_plugin_was_not_asked_for() -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        compose_config(overrides=["moe.experts=bmm"])
