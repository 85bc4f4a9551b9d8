"""The pinned versions resolve on PyPI alone: what a machine installs that has no wheels and no configuration of pip.

pip resolves without installing, from the wheels' metadata (100 MB for each Python, if the index serves whole wheels only).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ALONE = ("antlr4-python3-runtime==4.9.*", "rouge_score", "sqlitedict", "word2number")
PIP = "pip>=26"  # earlier ones download whole wheels for a dry run
CPU, FLOOR = "constraints-cpu.txt", "constraints-floor.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CASES = [(CPU, python, build) for python in PYTHONS for build in ("cpu", "cuda")] + [(FLOOR, "3.12", "cuda")]
pytestmark = pytest.mark.index


def run(*command: str | Path, **environment: str) -> str:
    """Run without what the machine's configuration and environment tell pip."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    env = kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"], "hatchling", "setuptools"]


def pinned_torch(constraints: str) -> str:
    return re.findall(r"^torch==(\S+)$", (ROOT / constraints).read_text(), re.M)[0]


def cpu_wheel(folder: Path, number: str) -> None:
    """Write a wheel that declares what torch's CPU build does: it asks for neither Triton nor CUDA's libraries."""
    name, info = f"torch-{number}+cpu", f"torch-{number}+cpu.dist-info"
    needs = ("filelock", "typing-extensions>=4.10", "setuptools", "sympy>=1.13.3", "networkx", "jinja2", "fsspec")
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as file:
        lines = "".join(f"Requires-Dist: {line}\n" for line in needs)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {number}+cpu\n{lines}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def resolve(pip: Path, wheels: Path, constraints: str, python: str, build: str) -> str:
    """Return which packages pip would install for a Python that need not be here."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-cache-dir"]
    command += ["--use-feature=fast-deps", "--python-version", python, "--only-binary=:all:"]
    command += ["--find-links", wheels / "source", *(["--find-links", wheels / "cpu"] if build == "cpu" else [])]
    said = run(*command, "--constraint", ROOT / constraints, *requirements(), PYTHONPATH=str(pip))
    return re.findall(r"^Would install (.*)$", said, re.M)[0]


@pytest.fixture(scope="session")
def resolutions(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Future[str]]:
    """Start all of them: pip mostly waits for the index."""
    pip, wheels = tmp_path_factory.mktemp("pip"), tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", pip, PIP)
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels / "source")
    run(*build, "--constraint", ROOT / CPU, *SOURCE_ALONE, PYTHONPATH=str(pip))
    (wheels / "cpu").mkdir()
    for constraints in (CPU, FLOOR):
        cpu_wheel(wheels / "cpu", pinned_torch(constraints))
    threads = ThreadPoolExecutor(len(CASES))
    return {case: threads.submit(resolve, pip, wheels, *case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_pins_resolve_on_pypi_alone(
    resolutions: dict[tuple[str, str, str], Future[str]], case: tuple[str, str, str]
) -> None:
    constraints, _, build = case
    chosen = resolutions[case].result()
    assert f"torch-{pinned_torch(constraints)}{'+cpu' if build == 'cpu' else ''} " in chosen
    assert ("nvidia-" in chosen) == (build == "cuda")
