"""The soak: that it kills, goes on and writes down what it did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.faults
def test_one_kill_is_survived_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    arguments = ["--seed", "3", "--kills", "1", "--kinds", "upcycle", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "soak: seed 3" in done.stdout and "1 kills, 1 jobs finished, nothing lost" in done.stdout
    report = json.loads(out.read_text())
    assert (report["seed"], report["num_kills"], report["lost"]) == (3, 1, None)
    (one,) = report["kills"]
    assert (one["kind"], one["mesh"]) == ("upcycle", "cp2-ep2")
    assert report["tensors_compared"] > 50 and report["files_compared"] > 20
    assert report["kills_by_victim"] == {one["victim"]: 1}
    assert report["kills_of_starts_that_trained"] == int(one["training"])


def test_the_committed_soaks_killed_on_three_meshes_at_least_thirty_times_and_lost_nothing() -> None:
    paths = sorted((ROOT / "benchmarks" / "results").glob("soak*.json"))
    reports = [json.loads(path.read_text()) for path in paths]
    assert [report["lost"] for report in reports] == [None] * len(reports)
    assert all(report["num_kills"] == len(report["kills"]) for report in reports)
    kills = [kill for report in reports for kill in report["kills"]]
    assert len(kills) >= 30
    assert len({kill["mesh"] for kill in kills}) == 3 and len({kill["victim"] for kill in kills}) >= 6
    assert {kill.get("kind", "pretraining") for kill in kills} == {
        "pretraining",
        "sft",
        "lora",
        "dpo",
        "upcycle",
        "merged",
        "mtp",
        "muon",
        "v",
    }
