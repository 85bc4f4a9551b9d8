"""The load benchmark: what it writes, and the claims in it that no clock decides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MESHES = ("ep4", "ep2_ep_shard2", "pp2_ep2")


def check_claims(report: dict[str, Any]) -> None:
    """Bytes by the kernel's count, scratch by resident memory, numbers equal to torch's reader."""
    allowed = max(64.0, report["largest_tensor_mib_float32"])
    for source in ("bfloat16", "fp8"):
        for mesh in MESHES:
            ours = report["results"][f"{source}/{mesh}/automoe"]
            # No rank has copies on these meshes.
            assert ours["bytes_read"] <= ours["kernel_bytes"] <= 1.05 * report["checkpoint_bytes"][source]
            assert ours["scratch_mib_worst_rank"] <= allowed
            theirs = report["results"][f"{source}/{mesh}/torch"]
            assert "failed" in theirs or theirs["shards_with_other_numbers"] == []
        assert report["results"][f"{source}/raw read"]["bytes_read"] == report["checkpoint_bytes"][source]
    assert report["results"]["bfloat16/transformers"]["seconds"] > 0
    assert report["index"]["entries"] > 90_000


@pytest.mark.exhaustive
def test_quick_run_keeps_the_claims(tmp_path: Path) -> None:
    script, out = str(ROOT / "benchmarks" / "hf_load.py"), tmp_path / "out.json"
    command = [sys.executable, script, "--quick", "--out", str(out), "--tmp", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["quick"]
    check_claims(report)
    assert list(tmp_path.iterdir()) == [out], "the checkpoints are removed"


def test_the_stored_result_keeps_the_claims() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "hf_load.json").read_text())
    assert not report["quick"] and report["checkpoint_bytes"]["bfloat16"] >= 1_000_000_000
    check_claims(report)
