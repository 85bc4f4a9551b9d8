"""Steps beside peers: every case runs with the peer's losses, and a step that differs reports nothing. Times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "peer_steps.py"


def run(script: Path, folder: Path, case: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    command = [sys.executable, str(script), "--quick", "--case", case, "--out", str(folder / "result.json")]
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.faults
@pytest.mark.parametrize("case", ["lora_16_experts", "trainer", "four_ranks"])
def test_a_case_has_the_losses_of_its_peer(tmp_path: Path, case: str) -> None:
    done = run(SCRIPT, tmp_path, case)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "result.json").read_text())
    seen = report["cases"][case]
    ours, theirs = seen["losses"].values()
    assert len(ours) == 4 and ours == pytest.approx(theirs, rel=1e-5) and len({*ours}) == 4
    assert all(0 < mb < 1e5 for mb in seen["peak_mb_above_the_loaded_model"].values())
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in seen["step_seconds"].values())


@pytest.mark.faults
def test_a_step_that_differs_is_not_reported(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    assert "return stats.loss\n" in (text := SCRIPT.read_text())
    wrong.write_text(text.replace("return stats.loss\n", "return 1.001 * stats.loss\n"))
    done = run(wrong, tmp_path, "trainer")
    assert done.returncode == 1 and "losses differ by up to 1.0e-03" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "result.json").exists()
