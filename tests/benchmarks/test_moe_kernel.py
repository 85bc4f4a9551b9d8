"""The GPU layer benchmark, as far as a CPU goes: its gate, and the shape of what it writes. Times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "moe_kernel.py"
HERE_TOO = {"automoe grouped_mm", "transformers grouped_mm", "three grouped_mm", "eager loop"}


def run_script(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.exhaustive
def test_quick_run_compares_every_peer_that_is_here_and_says_why_others_are_not(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run_script(out, "--quick")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert len(report["commit"].rstrip("+")) == 40 and report["environment"]["torch"]
    assert report["ceilings"].keys() == {"cube", "copy_bytes", "layer"}
    for name, routings in report["layers"].items():
        shape = report["shapes"][name]
        assert shape["flops"] == 6 * shape["tokens"] * shape["top_k"] * shape["hidden"] * shape["width"]
        assert routings.keys() == {"balanced", "zipf", "empty"}
        for peers in routings.values():
            for peer, facts in peers.items():
                assert ("absent" in facts) or facts["tflops"] > 0, peer
            for peer in HERE_TOO:
                differences = peers[peer]["differences"]
                assert differences.keys() == {"out", "x", "weights", "gate_up_proj", "down_proj"}
                assert 0 < max(differences.values()) <= report["tolerance"]
            for peer in ("automoe triton", "automoe te", "liger", "sonicmoe"):
                assert "CUDA" in peers[peer]["absent"]
            kept = {peer: peers[peer]["saved_bytes_a_token"] for peer in HERE_TOO}
            assert kept["automoe grouped_mm"] == min(kept.values())
            assert kept["automoe grouped_mm"] < 1.25 * shape["ideal_saved_bytes"]  # indices weigh in at this size
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "saved/ideal" in done.stdout


@pytest.mark.exhaustive
def test_a_wrong_peer_is_not_timed(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run_script(out, "--quick", "--spoil", "three grouped_mm")
    assert done.returncode == 1
    assert "small, balanced: three grouped_mm: differs from float32 by {'out'" in done.stderr
    for routings in json.loads(out.read_text())["layers"].values():
        for peers in routings.values():
            assert peers["three grouped_mm"]["failed"] and "tflops" not in peers["three grouped_mm"]
            assert peers["automoe grouped_mm"]["tflops"] > 0 and peers["eager loop"]["tflops"] > 0
    assert "saved/ideal" in done.stdout


@pytest.mark.exhaustive
def test_without_a_gpu_the_full_run_says_what_it_needs(tmp_path: Path) -> None:
    done = run_script(tmp_path / "result.json")
    assert done.returncode == 1 and "needs a CUDA device" in done.stderr
