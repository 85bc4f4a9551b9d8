"""``python -m automoe.train`` from the command to the files it leaves, on two ranks."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from automoe.config.metrics import REQUIRED_KEYS
from automoe.launch.run_dir import read_status
from automoe.observe.metrics import read_jsonl, read_metrics

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "data.max_bytes=100000",
    "train.steps=6",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.val_every=3",
    "train.val_batches=1",
    "launch.num_ranks=2",
    "launch.device=cpu",
    "checkpoint.export_hf=false",
)
UNIFORM = math.log2(264)  # bits per byte of an even guess over the vocabulary
# Of a step's record, all that does not depend on the clock or on what else the process has in memory.
REPEATED = ("step", "loss", "grad_norm", "lr", "tokens", "seq_balance_loss", "max_over_mean", "skipped")


def train(run_dir: Path, *overrides: str) -> str:
    """Run the command to its end and return what it printed."""
    command = [sys.executable, "-m", "automoe.train", f"run_dir={run_dir}", *SMALL, *overrides]
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(run_dir.parent / "cache"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, text=True, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def repeated(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: record[key] for key in REPEATED} | validation(record) for record in records]


def validation(record: dict[str, Any]) -> dict[str, float]:
    return {key: record[key] for key in record if key.startswith("val_")}


MESH = ("mesh.pp=2", "mesh.ep=1", "checkpoint.every=3", "optim.ema_decay=0.5")
SAMPLES = ("observe.samples=['<b>def ','import os']", "observe.sample_tokens=12")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a run that nobody interrupts, and what it printed."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, train(run_dir, *MESH, *SAMPLES, "observe=wandb_offline", "observe.tensorboard=true")


@pytest.fixture(scope="module")
def resumed(straight: tuple[Path, str]) -> tuple[Path, str]:
    """The same after a crash between steps 5 and 6, with steps 4 and 5 recorded and not saved."""
    run_dir = straight[0].parent / "resumed"
    shutil.copytree(straight[0], run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-6")
    (run_dir / "checkpoints" / "LATEST").write_text("step-3\n")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:5]))
    return run_dir, train(run_dir, *MESH, *SAMPLES, "observe.report=false", "observe.tensorboard=true")


def test_a_run_leaves_its_record_its_report_and_wandb_files(straight: tuple[Path, str]) -> None:
    run_dir, said = straight
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert [key for key in REQUIRED_KEYS if key not in record] == []
        assert all(math.isfinite(record[key]) for key in REQUIRED_KEYS if key != "mfu")
        assert record["mfu"] is None, "no peak is known for this machine"
        assert (record["step"] % 3 == 0) == bool(validation(record))
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["tokens"] == 6 * 8 * 32
    first, last = (records[step - 1]["val_bits_per_byte"] for step in (3, 6))
    assert 0 < last < first
    assert last < UNIFORM, "a model that learned nothing guesses evenly"
    first, last = (records[step - 1] for step in (3, 6))
    assert last["val_loss"] < last["val_loss_ema"] < first["val_loss"], "averages follow"
    assert read_status(run_dir) | {"state": "done", "objective": records[-1]["val_loss"]} == read_status(run_dir)
    assert "bits per byte" in said
    assert said.count("warning") == 1 and "than half of the 6 steps" in said, "20 steps of warm-up"
    assert said.endswith(f"report {run_dir / 'report.html'}\n")

    report = (run_dir / "report.html").read_text()
    assert report.lower().startswith("<!doctype html>") and len(report) > 10_000
    assert len(list((run_dir / "plots").glob("*.png"))) >= 5
    (offline,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    assert offline.stat().st_size > 1000
    assert len((run_dir / "expert_load.jsonl").read_text().splitlines()) == 6
    assert json.loads((run_dir / "environment.json").read_text())

    samples = read_jsonl(run_dir / "samples.jsonl")
    assert [record["step"] for record in samples] == [3, 6]
    assert [pair["prompt"] for pair in samples[1]["samples"]] == ["<b>def ", "import os"]
    assert "<b>def" not in report and "&lt;b&gt;def" in report and "> import os" in said and "answered in" in said


@pytest.mark.exhaustive
def test_a_resumed_pipeline_run_is_the_uninterrupted_one(straight: tuple[Path, str], resumed: tuple[Path, str]) -> None:
    run_dir, said = resumed
    assert "after step 3" in said
    assert said.count("warning") == 1 and "than half of the 6 steps" in said
    expected = read_metrics(straight[0])
    assert repeated(read_metrics(run_dir)) == repeated(expected)
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(straight[0] / "samples.jsonl")
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"LATEST", "step-3", "step-6"}
    assert read_status(run_dir)["objective"] == expected[-1]["val_loss"]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(record["step"], pytest.approx(record["loss"])) for record in expected], "each step once"


@pytest.mark.exhaustive
def test_a_run_that_is_done_says_so_and_keeps_its_objective(resumed: tuple[Path, str]) -> None:
    run_dir, _ = resumed
    finished = read_status(run_dir)
    said = train(run_dir, *MESH, "observe.report=false")
    assert "already at step 6 of 6" in said
    assert said.count("warning") == 1 and "than half of the 6 steps" in said
    assert read_status(run_dir)["state"] == "done"
    assert read_status(run_dir)["objective"] == finished["objective"]


@pytest.mark.exhaustive
def test_a_run_that_saves_nothing_has_no_checkpoints(tmp_path: Path) -> None:
    train(tmp_path / "run", "mesh.pp=1", "mesh.ep=2", "checkpoint.every=0", "observe.report=false")
    assert read_metrics(tmp_path / "run")[-1]["step"] == 6
    assert not (tmp_path / "run" / "checkpoints").exists()
