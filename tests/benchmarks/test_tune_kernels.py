"""The script that times blocks: every candidate computes the same, and one that does not is not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from automoe.moe.kernels.blocks import HOPPER, candidates

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "tune_kernels.py"


@pytest.mark.exhaustive
def test_every_candidate_of_every_product_is_right_and_timed(tmp_path: Path) -> None:
    out = tmp_path / "tune.json"
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--out", out], capture_output=True, text=True, check=True
    )
    found = json.loads(out.read_text())["cases"]["small"]
    assert set(found) == set(HOPPER)
    for product, rows in found.items():
        assert len(rows) == len(candidates(product))
        assert all(row["tflops"] > 0 for row in rows), rows
        assert f"small: {product}" in ended.stdout


def test_blocks_are_candidates_once() -> None:
    for product, chosen in HOPPER.items():
        found = candidates(product)
        assert found[0] == chosen and len(set(found)) == len(found)
