"""The MoE layer benchmark: its gates, and the shape of what it writes. Times are never judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "moe_layer.py"


def run_script(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.exhaustive
def test_quick_run_passes_the_gates_and_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run_script(out)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["device"] == "cpu" and report["quick"] and len(report["commit"].rstrip("+")) == 40
    assert report["versions"]["torch"] == version("torch")
    assert {r["dispatcher"] for r in report["results"].values()} == {"alltoall", "allgather"}
    assert len({r["mapping"] for r in report["results"].values()}) >= 4
    folds = [r["mesh"] for r in report["results"].values()]
    for wanted in ({"ep": 8}, {"tp": 4, "ep": 8}, {"ep": 4, "etp": 2}, {"dp_shard": 8, "ep": 2}):
        assert any(wanted.items() <= mesh.items() for mesh in folds)
    for result in report["results"].values():
        assert result["difference"] <= report["gate_tolerance"]
        assert result["host_syncs"] == 1 + (result["mesh"].get("etp", 1) > 1)
        assert len(result["rounds"]) == 2 and result["cpu_seconds"] > result["forward_cpu_seconds"] > 0
    ratio = report["allgather_over_alltoall"]
    assert ratio["bytes"] == pytest.approx(report["ep_over_k"], rel=0.02)
    assert all(len(ratio["rounds"][key]) == 2 for key in ("wall", "cpu"))
    folded, plain = (
        report["results"][f"{name} | alltoall"]["sent_bytes_a_rank"] for name in ("ep8", "ep8 over tp4 dp2")
    )
    assert folded == plain, "folding over tp sends nothing more"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.rstrip().splitlines()[-1].startswith("ep8, all-gather over all-to-all: bytes 4.0")


@pytest.mark.exhaustive
def test_a_layer_that_differs_is_not_written(tmp_path: Path) -> None:
    """One contender's weights off by a thousandth."""
    out = tmp_path / "result.json"
    done = run_script(out, "--spoil", "ep4 etp2 | alltoall")
    assert done.returncode != 0 and not out.exists()
    assert "ep4 etp2 | alltoall: differs from the layer with all experts on each rank" in done.stderr
