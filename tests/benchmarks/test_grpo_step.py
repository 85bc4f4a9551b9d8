"""A step of reinforcement learning beside TRL's ``GRPOTrainer``: the same losses and norms. Times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.faults
def test_updates_have_the_losses_and_norms_of_trl(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "benchmarks" / "grpo_step.py"), "--quick", "--no-peaks", "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    for run in report["runs"]:
        assert len(run["losses"]["automoe"]) == len(run["losses"]["trl"]) == 6
        assert run["grad_norms"]["automoe"] == pytest.approx(run["grad_norms"]["trl"], rel=1e-3)
        assert run["losses"]["automoe"] == pytest.approx(run["losses"]["trl"], abs=1e-4)
    assert len(report["commit"].rstrip("+")) == 40
