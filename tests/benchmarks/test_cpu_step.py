"""The CPU step benchmark: its gate, and the shape of what it writes. Times are never judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_script(*arguments: str, cwd: Path = ROOT, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else [str(ROOT / "benchmarks" / "cpu_step.py")]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.exhaustive
def test_quick_run_passes_the_gate_and_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run_script("--quick", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["threads"] == 1 and report["dtype"] == "float32" and len(report["commit"].rstrip("+")) == 40
    assert report["versions"]["torch"] == version("torch")
    assert "bfloat16" in report["absent"]["torchtitan"]
    assert set(report["models"]) == {"coarse", "fine", "mla"}
    for model in report["models"].values():
        ours = {"automoe", "automoe decoder"}
        theirs = {"transformers grouped_mm", "transformers eager"}
        automodel = {name for name in model["results"] if name.startswith("nemo_automodel")}
        assert set(model["results"]) == ours | theirs | automodel
        assert bool(automodel) != ("nemo_automodel" in model["absent"])
        assert set(model["gate"]) == set(model["results"]) - {"automoe"}
        for gate in model["gate"].values():
            assert max(gate["loss"], gate["worst_gradient"]) <= report["gate_tolerance"]
        for result in model["results"].values():
            assert result["tokens_per_cpu_second"] > 0
            assert len(result["ours_over_this_rounds"]) == len(result["step_seconds_rounds"]) == 2
            assert result["step_seconds"] > 0 and result["ours_over_this"] > 0
        assert model["best_other"] in theirs | automodel
        assert model["ours_over_best_other"] == model["results"][model["best_other"]]["ours_over_this"]
        assert set(model["torchtitan_experts"]) == {"automoe float32", "automoe bfloat16", "torchtitan bfloat16"}
        assert (
            model["floors"]["whose"].startswith("torch's")
            and model["floors"]["gemm_flops"] > 0
            and model["floors"]["seconds"] > 0
        )
        shares = [row["share"] for row in model["breakdown"]["automoe"]]
        assert sum(shares) == pytest.approx(1.0)


@pytest.mark.exhaustive
def test_a_model_that_differs_is_not_timed(tmp_path: Path) -> None:
    """One weight of ours off by a thousandth: the gate must stop the run and name a gradient."""
    out = tmp_path / "result.json"
    code = (
        "import sys, contenders, torch\n"
        "build = contenders.decoder_contender\n"
        "def off(*args):\n"
        "    ours = build(*args)\n"
        "    with torch.no_grad():\n"
        "        ours.model.norm.weight.mul_(1.001)\n"
        "    return ours\n"
        "contenders.decoder_contender = off\n"
        "import cpu_step\n"
        "cpu_step.main()\n"
    )
    done = run_script("--quick", "--out", str(out), code=code)
    assert done.returncode != 0 and "Nothing was timed" in done.stderr and "the gradient of" in done.stderr
    assert not out.exists()
