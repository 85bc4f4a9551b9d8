"""The script that times blocks: every candidate computes the same, and one that does not is not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from automoe.kernels.tiling import HOPPER
from benchmarks.measuring import candidates

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# The last candidate of each product, which alone sums 128 a step, leaves its memory as it was.
WITH_A_FAULT = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import tune_kernels
from automoe.kernels import launches
true_launch, true_grad = launches._over_rows, launches.grad_weights

def broken(kernel, tiles, num_columns, blocks, *rest, **more):
    if blocks.summed != 128:
        true_launch(kernel, tiles, num_columns, blocks, *rest, **more)

launches._over_rows = broken
launches.grad_weights = lambda *args: args[4] if launches.blocks_of().summed == 128 else true_grad(*args)
tune_kernels.main()
"""


@pytest.mark.exhaustive
def test_every_candidate_that_is_right_is_timed_and_no_other(tmp_path: Path) -> None:
    out = tmp_path / "tune.json"
    ended = subprocess.run(
        [sys.executable, "-c", WITH_A_FAULT, "--quick", "--out", out], capture_output=True, text=True, check=True
    )
    found = json.loads(out.read_text())["cases"]["small"]
    assert set(found) == set(HOPPER)
    for product, rows in found.items():
        assert len(rows) == len(candidates(product))
        assert all("tflops" in row and "failed" not in row for row in rows[:-1]), rows
        assert rows[-1]["failed"].startswith("differs from float32") and "tflops" not in rows[-1]
        assert f"small: {product}" in ended.stdout


def test_blocks_are_candidates_once() -> None:
    for product, chosen in HOPPER.items():
        found = candidates(product)
        assert found[0] == chosen and len(set(found)) == len(found)
        assert [blocks.summed for blocks in found] == [64] * (len(found) - 1) + [128]
