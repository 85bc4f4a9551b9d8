"""``docs/rl.md``, block by block, as a reader would run it in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from automoe.observe.metrics import read_metrics
from tests.support.command import ROOT

PAGE = (ROOT / "docs" / "rl.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", PAGE, re.M | re.S)


def run(command: list[str], folder: Path) -> str:
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def run_page(folder: Path, overrides: str) -> None:
    """Run all blocks in order; ``overrides`` are added to every training."""
    (folder / "bin").mkdir()
    command = folder / "bin" / "automoe"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m automoe "$@"\n')
    command.chmod(0o755)
    for language, block in BLOCKS:
        name = re.match(r"# (\w+\.py)\n", block)
        if language == "bash":
            run(["bash", "-ec", re.sub(r"^(automoe train .*)$", rf"\1 {overrides}", block, flags=re.M)], folder)
        elif name:
            (folder / name[1]).write_text(block)
            assert run([sys.executable, name[1]], folder)
        else:  # the function that takes the recipe's place
            recipe = (folder / "recipes" / "grpo.py").read_text()
            own, count = re.subn(r"^def reward\(.*?(?=^def )", f"{block}\n\n", recipe, flags=re.M | re.S)
            assert count == 1
            (folder / "recipes" / "grpo.py").write_text(own)


def test_the_page_has_blocks() -> None:
    assert [language for language, _ in BLOCKS] == ["bash", "bash", "python", "bash", "python", "python"]


@pytest.mark.smoke
def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    run_page(tmp_path, "")
    digits, vowels = (
        [one["reward"] for one in read_metrics(tmp_path / "runs" / name)] for name in ("grpo_small", "vowels")
    )
    assert digits[0] < 0.1 and digits[-1] > 0.9 and vowels[-1] > 0.9 > vowels[0]
    report = (tmp_path / "runs" / "grpo_small" / "report.html").read_text()
    for title in ("Mean reward", "Mean length of the answers", "Distance from the first weights", "Mean gap of engine"):
        assert title in report


@pytest.mark.faults
def test_every_block_runs(tmp_path: Path) -> None:
    run_page(tmp_path, "train.steps=2 observe.report=false checkpoint.export_hf=false model.num_layers=2")
    assert {one["step"] for one in read_metrics(tmp_path / "runs" / "vowels")} == {1, 2}
