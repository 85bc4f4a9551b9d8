"""The wheel alone, installed outside the checkout, trains: nothing that runs is left behind in the sources."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


def call(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools packs whatever an earlier build left in build/."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    shutil.copytree(CHECKOUT / "automoe", source / "automoe", ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    call([*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(source)], cwd=out)
    (built,) = out.glob("automoe-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    call([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], cwd=target)
    return target


def test_the_wheel_has_every_module_and_config(wheel: Path) -> None:
    package = CHECKOUT / "automoe"
    sources = {
        path.relative_to(CHECKOUT).as_posix() for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("automoe/")}
    assert packed == sources
    assert any(name.startswith("conf/model/") and name.endswith(".yaml") for name in packed)


def test_the_installed_package_trains_two_steps(installed: Path, tmp_path: Path) -> None:
    where = call([sys.executable, "-c", "import automoe; print(automoe.__file__)"], tmp_path, PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    overrides = ["train.steps=2", "train.seq_len=64", "data.max_bytes=300000", "run_dir=run"]
    call([sys.executable, "-m", "automoe.train", *overrides], tmp_path, PYTHONPATH=str(installed))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert (tmp_path / "run" / "report.html").stat().st_size > 0


def test_the_console_script_lists_its_commands(installed: Path, tmp_path: Path) -> None:
    text = call([str(installed / "bin" / "automoe"), "--help"], tmp_path, PYTHONPATH=str(installed))
    for command in ("train", "plan", "verify", "export"):
        assert command in text
