"""Fine-tuning beside TRL's ``SFTTrainer``: the same losses for 20 steps on the same packed rows. Times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.faults
def test_twenty_steps_have_the_losses_of_trl(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "benchmarks" / "sft_step.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    losses = report["step"]["losses"]
    assert len(losses["automoe"]) == len(losses["trl"]) == 20 and losses["automoe"][-1] < losses["automoe"][0] - 0.05
    assert losses["automoe"] == pytest.approx(losses["trl"], rel=1e-5)
    assert 0.2 < report["step"]["trained_share"] < 0.8  # answers alone, in rows that are packed
    assert all(mix["efficiency"] >= 0.95 for mix in report["packing"].values())
    assert len(report["commit"].rstrip("+")) == 40
