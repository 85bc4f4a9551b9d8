"""What the environment holds is used, and only its name is written."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from automoe.config.compose import compose_config
from automoe.config.convert import config_to_dict, written
from automoe.config.frozen import differences, dump_config, load_config, parse_config, save_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.observe.metrics import read_metrics
from automoe.observe.summary import describe_run
from tests.support.command import TINY, TrainCommand

SECRET = "s3cr3t-0123"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    for name, value in {"TOKEN": SECRET, "STEPS": "7", "WHICH": "TOKEN", "DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    return compose_config(
        overrides=[
            "data=text",
            "data.path='/${oc.env:TOKEN}/x-${oc.env:TOKEN}'",
            "data.text_key='${data.path}'",  # through another key
            "observe.wandb_project='${oc.env:${oc.env:WHICH}}'",  # by a name that is held too
            "data.tokenizer=${oc.env:ABSENT,byte}",
            "train.steps='${oc.decode:${oc.env:STEPS}}'",
            "launch.device=${oc.env:DEVICE}",
            "plugins=[]",
        ]
    )


def test_values_are_those_of_the_environment(config: Config) -> None:
    assert config.data.path == config.data.text_key == f"/{SECRET}/x-{SECRET}"
    assert (config.observe.wandb_project, config.data.tokenizer, config.train.steps) == (SECRET, "byte", 7)
    assert config.launch.device == "cpu" and Path(str(config.data.path)).name == f"x-{SECRET}"


def test_what_is_written_names_the_variable(config: Config, tmp_path: Path) -> None:
    text = save_config(config, tmp_path).read_text()
    for shown in (text, dump_config(config), json.dumps(config_to_dict(config))):
        assert SECRET not in shown and "/${oc.env:TOKEN}/x-${oc.env:TOKEN}" in shown
    assert load_config(tmp_path) == config and dump_config(load_config(tmp_path)) == text
    again = pickle.loads(pickle.dumps(copy.deepcopy(replace(config))))
    assert dump_config(again) == text
    assert not differences(config_to_dict(config), config)


def test_another_environment_and_none(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    text = dump_config(config)
    assert parse_config(text, environment={"TOKEN": "b"}).data.path == "/b/x-b"
    monkeypatch.delenv("TOKEN")
    assert parse_config(text).data.path == "/${oc.env:TOKEN}/x-${oc.env:TOKEN}"


def test_the_report_and_the_plan_name_the_variable(config: Config) -> None:
    facts = dict(describe_run(config, resolve_mesh(MeshConfig(), 1)))
    assert facts["data"] == "text /${oc.env:TOKEN}/x-${oc.env:TOKEN}, byte tokenizer"
    assert written("plain") == "plain"


@pytest.mark.faults
def test_no_file_of_a_run_holds_what_the_environment_holds(tmp_path: Path) -> None:
    """Configuration, checkpoint, metrics, logs, report and an offline tracker's record, and a resume of it."""
    (tmp_path / SECRET).mkdir()
    (tmp_path / SECRET / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    run_dir = tmp_path / "run"
    command = TrainCommand(run_dir, TINY, {"CORPUS": str(tmp_path / SECRET)})
    asked = ["data=text", "data.path='${oc.env:CORPUS}/corpus.txt'", "observe.wandb=offline", "observe.report=true"]
    asked += ["checkpoint.every=1", "mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "data.val_fraction=0"]
    for steps in (2, 3):
        status, out, err = command.run(*asked, f"train.steps={steps}")
        assert status == 0, out + err
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3]
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "manifest.json", "status.json"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert b"${oc.env:CORPUS}" in (run_dir / "config.yaml").read_bytes()
