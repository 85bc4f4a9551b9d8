"""The script that times blocks: every candidate computes the same, and one that does not is not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from automoe.moe.kernels.blocks import HOPPER, candidates

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Blocks of 256 columns write nothing; gradients of weights, which are written where those before them were, either.
WITH_A_FAULT = """
import sys
sys.path.insert(0, {benchmarks!r})
import tune_kernels
from automoe.moe.kernels import launches
true_launch, true_grad = launches._over_rows, launches.grad_weights

def broken(kernel, tiles, num_columns, blocks, *rest, **more):
    if blocks.columns != 256:
        true_launch(kernel, tiles, num_columns, blocks, *rest, **more)

launches._over_rows = broken
launches.grad_weights = lambda *args: args[4] if args[5].columns == 256 else true_grad(*args)
tune_kernels.main()
"""


def tune(out: Path, *command: str) -> tuple[dict[str, list[dict]], str]:
    ended = subprocess.run(
        [sys.executable, *command, "--quick", "--out", out], capture_output=True, text=True, check=True
    )
    return json.loads(out.read_text())["cases"]["small"], ended.stdout


@pytest.mark.exhaustive
def test_every_candidate_of_every_product_is_right_and_timed(tmp_path: Path) -> None:
    found, printed = tune(tmp_path / "tune.json", str(BENCHMARKS / "tune_kernels.py"))
    assert set(found) == set(HOPPER)
    for product, rows in found.items():
        assert len(rows) == len(candidates(product))
        assert all(row["tflops"] > 0 for row in rows), rows
        assert f"small: {product}" in printed


@pytest.mark.exhaustive
def test_a_candidate_that_leaves_its_memory_as_it_was_is_not_timed(tmp_path: Path) -> None:
    script = WITH_A_FAULT.format(benchmarks=str(BENCHMARKS))
    found, printed = tune(tmp_path / "tune.json", "-c", script)
    for product, rows in found.items():
        for row in rows:
            assert ("failed" in row) == (row["blocks"]["columns"] == 256) == ("tflops" not in row), (
                product,
                row,
            )
    assert "differs from float32" in printed


def test_blocks_are_candidates_once() -> None:
    for product, chosen in HOPPER.items():
        found = candidates(product)
        assert found[0] == chosen and len(set(found)) == len(found)
