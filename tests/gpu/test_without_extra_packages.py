"""A machine with a GPU may have torch and transformers and little else: the tests for it run there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from absent_packages import ABSENT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, without the packages of ``ABSENT``."""
    # No plugins but ours: Hydra brings one, and the process would have Hydra before it could be hidden.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "absent_packages", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=ROOT, env=env, text=True, capture_output=True, timeout=600)


@pytest.mark.exhaustive
def test_every_gpu_test_of_the_suite_is_collected() -> None:
    result = run_pytest("-m", "gpu", "--collect-only")
    assert result.returncode == 0, result.stdout + result.stderr
    for file in HERE.glob("test_device_*.py"):
        assert f"tests/gpu/{file.name}::" in result.stdout


@pytest.mark.exhaustive
def test_their_bodies_run() -> None:
    """The same tests on the CPU, one family each."""
    result = run_pytest(str(HERE), "-k", "cpu and (mixtral or random or checkpoint or recipe)")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "skipped" not in result.stdout


def run_bare(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``code`` without the packages of ``ABSENT``, and without automoe: what is installed as editable is not seen."""
    packages = sysconfig.get_path("purelib")
    command = [sys.executable, "-S", "-c", f"import absent_packages; absent_packages.hide(); {code}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), packages]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=600)


@pytest.mark.exhaustive
def test_scripts_for_one_gpu_find_the_checkout(tmp_path: Path) -> None:
    missing = run_bare("import automoe.errors", tmp_path)  # conf/ and recipes/ may lie where packages do, and no module
    assert "No module named 'automoe" in missing.stderr
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import moe_kernel, train_step, tune_kernels"
    found = run_bare(code + "; import automoe; print(automoe.__file__)", tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(ROOT / "automoe" / "__init__.py")


@pytest.mark.parametrize("command", ["train", "plan", "verify"])
def test_commands_say_what_is_missing(command: str) -> None:
    ended = run_bare(f"from automoe.{command} import main; raise SystemExit(main([]))", ROOT)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    assert "has no hydra and no omegaconf" in ended.stderr and "make setup" in ended.stderr


@pytest.mark.parametrize("name", ABSENT)
def test_the_packages_are_really_hidden(name: str) -> None:
    command = [sys.executable, "-c", f"import absent_packages; absent_packages.hide(); import {name}"]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, text=True)
    assert "ModuleNotFoundError" in result.stderr
