"""A machine with a GPU may have torch and transformers and little else: the tests for it run there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from absent_packages import ABSENT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, without the packages of ``ABSENT``."""
    # No plugins but ours: Hydra brings one, and the process would have Hydra before it could be hidden.
    env = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "absent_packages", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=env, text=True, capture_output=True, timeout=600
    )


def test_every_gpu_test_of_the_suite_is_collected() -> None:
    result = run_pytest("-m", "gpu", "--collect-only")
    assert result.returncode == 0, result.stdout + result.stderr
    for file in HERE.glob("test_device_*.py"):
        assert f"tests/gpu/{file.name}::" in result.stdout


def test_their_bodies_run() -> None:
    """The same tests on the CPU, one family each."""
    result = run_pytest(str(HERE), "-k", "cpu and (mixtral or random or checkpoint or recipe)")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "skipped" not in result.stdout


@pytest.mark.parametrize("name", ABSENT)
def test_the_packages_are_really_hidden(name: str) -> None:
    command = [sys.executable, "-c", f"import absent_packages; absent_packages.hide(); import {name}"]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, text=True
    )
    assert "ModuleNotFoundError" in result.stderr
