"""``automoe demo``: what it calls equal is equal, and what it breaks is found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from automoe import demo
from automoe.config.compose import parse_arguments
from automoe.launch.prepare import compose
from automoe.launch.trial_runs import differing
from automoe.observe.metrics import read_metrics
from automoe.verify.pool import RankPool
from automoe.verify.run import make_runnable, passes, verify_pass


@pytest.mark.exhaustive
def test_the_broken_collective_is_found_in_gradients_behind_equal_losses(ranks: RankPool) -> None:
    config, shape, cuts = make_runnable(compose(parse_arguments(demo.STEP.split())))
    assert not cuts and shape.world_size == 4 and shape.ep == 4
    small = replace(passes(config)[0], train=replace(passes(config)[0].train, seq_len=16))
    assert not verify_pass(small, shape, ranks).different
    found = verify_pass(small, shape, ranks, demo.broken_trajectory).different
    assert found[0].kind == "gradient" and "loss" not in {c.kind for c in found}
    assert not verify_pass(small, shape, ranks).different  # and nothing of it stays


RECORDS = [{"step": 1, "loss": 2.0, "expert": [1, 2], "step_seconds": 0.5}, {"step": 2, "loss": 1.5, "val_loss": 1.0}]


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, []),
        ({"step_seconds": 9.0, "tokens_per_second": 3, "peak_memory_bytes": 1}, []),
        ({"loss": 2.0000000000000004}, ["step 1: loss"]),
        ({"expert": [2, 1], "lr": 0.1}, ["step 1: expert, lr"]),
        ({"loss": float("nan")}, ["step 1: loss"]),
        (None, ["1 steps instead of 2", "step 1: loss, step, val_loss, expert"]),
    ],
)
def test_any_number_that_is_not_a_clock_counts(change: dict | None, said: list[str]) -> None:
    got = RECORDS[1:] if change is None else [RECORDS[0] | change, RECORDS[1]]
    found = differing(RECORDS, got)
    assert [sorted(line.replace(",", "").split()) for line in found] == [
        sorted(line.replace(",", "").split()) for line in said
    ]
    not_a_number = [{"step": 1, "loss": float("nan")}]
    assert differing(not_a_number, [dict(not_a_number[0])]) == []


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--dir", str(tmp_path)]) == 2
    assert "exists, and nothing is overwritten" in capsys.readouterr().err
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.setattr(demo, "show_step", lambda console: False)
    monkeypatch.setattr(demo, "show_run", lambda console, folder: folder == Path("runs/demo.1"))
    assert demo.main([]) == 1  # a part that is not as it should be is not a success
    monkeypatch.setattr(demo, "show_step", lambda console: True)
    assert demo.main(["--no-open"]) == 0


@pytest.mark.faults
def test_the_whole_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "automoe.cli", "demo", "--dir", "shown"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first difference step 0 gradient of embed_tokens" in done.stdout
    assert "EQUAL  to the bit" in done.stdout and "killed after step" in done.stdout
    report = tmp_path / "shown" / "killed" / "report.html"
    assert report.stat().st_size > 0 and "shown/killed/report.html" in done.stdout
    assert len(read_metrics(tmp_path / "shown" / "whole")) == demo.STEPS
