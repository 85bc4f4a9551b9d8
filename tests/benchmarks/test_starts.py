"""The benchmark of starts and of the documented commands: what it writes and refuses. Times are never judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))}
USES = """
import sys
from pathlib import Path
from starts import HERE, checkout, timed

with checkout("HEAD") as (commit, root):
    assert len(commit) == 40 and (root / "benchmarks" / "trajectories.py").exists()
assert not root.exists()
timed(HERE.parent, ("mesh.ep=3",), Path(sys.argv[1]))
"""


@pytest.mark.exhaustive
def test_one_case_is_measured_and_written(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "starts.py", "--case", "two ranks, no report", "--rounds", "1"]
    subprocess.run([*command, "--out", tmp_path / "out.json"], check=True, env=ENV)
    found = json.loads((tmp_path / "out.json").read_text())["results"]["two ranks, no report"]["now"]
    # All processes of the run, and not the launching one alone.
    assert found["cpu_seconds"] > 2 and len(found["rounds"]) == 1


def test_the_files_of_another_commit_are_there_for_a_while_and_a_failed_run_is_no_number(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", USES, tmp_path], env=ENV, capture_output=True, text=True)
    assert done.returncode == 1
    assert "left with 2, not 0. Nothing was written." in done.stderr and "error: mesh.ep=3" in done.stderr


@pytest.mark.exhaustive
def test_a_quick_job_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "benchmarks" / "starts.py")
    done = subprocess.run(
        [sys.executable, script, "--job", "--quick", "--out", str(out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["quick"] and len(report["commit"].rstrip("+")) == 40 and report["cpu"]
    assert len(report["load_average_before"]) == 3 and set(report["versions"]) >= {"torch"}
    assert set(report["commands"]) == {"train --help", "config error", "plan", "plan --build"}
    for result in report["commands"].values():
        assert result["command"].startswith("python -m automoe.")
        assert result["seconds"] > 0 and result["cpu_seconds"] > 0 and len(result["rounds"]) == 1

    run = report["run"]
    assert run["steps"] == 4 and [step for step, _, _ in run["bits_per_byte"]] == [2, 4]
    times = [run["seconds_to_first_step"], *(seconds for _, seconds, _ in run["bits_per_byte"])]
    assert times == sorted(times) and 0 < times[0]
    assert run["final_bits_per_byte"] == run["bits_per_byte"][-1][2] > report["goal_bits_per_byte"]
    assert run["seconds_to_goal"] is None, "a few steps cannot learn that much"
    assert run["cpu_seconds"] > 0 and "never" in done.stdout and "written to" in done.stdout


def test_a_command_that_ends_in_another_way_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    starts = import_module("starts")

    monkeypatch.setitem(starts.COMMANDS, "plan", (("automoe.plan", "--config-name", "nothing"), 0))
    with pytest.raises(SystemExit, match=r"left with 2, not 0[\s\S]*nothing"):
        starts.time_command("plan", tmp_path)
