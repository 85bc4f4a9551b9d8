"""The benchmark of the documented commands: the shape of what it writes. Times are never judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
def test_quick_run_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "benchmarks" / "main_job.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--out", str(out)], capture_output=True, text=True, timeout=300
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
    main_job = import_module("main_job")

    monkeypatch.setitem(main_job.COMMANDS, "plan", (("automoe.plan", "--config-name", "nothing"), 0))
    with pytest.raises(SystemExit, match=r"left with 2, not 0[\s\S]*nothing"):
        main_job.time_command("plan", tmp_path)
