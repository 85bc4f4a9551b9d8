"""The ways to have automoe all train: the wheel outside a checkout, an installed checkout, a bare checkout.

The wheel is built from the sdist, as an installer does that finds no wheel, so that what is missing in one misses in both.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
ROOMS = ("automoe", "conf", "recipes")
TINY = ("experiment=smoke", "train.steps=2", "data.max_bytes=100000", "observe.report=false", "launch.device=cpu")


def call(command: list[str], cwd: Path, path: Path | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1"} | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def train(cwd: Path, path: Path | None, *overrides: str) -> str:
    """Output of a run in ``cwd``/run, whose record must have two finite steps."""
    said = call([sys.executable, "-m", "automoe.train", "run_dir=run", *overrides], cwd, path)
    rows = [json.loads(line) for line in (cwd / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    return said


def package_folder(cwd: Path, path: Path | None) -> Path:
    return Path(call([sys.executable, "-c", "import automoe; print(automoe.__file__)"], cwd, path).strip()).parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that nothing an earlier build left behind is packed."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, folder)
    for room in ROOMS:
        shutil.copytree(CHECKOUT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    call(
        [
            sys.executable,
            "-c",
            "import sys; from hatchling.build import build_sdist; build_sdist(sys.argv[1])",
            str(out),
        ],
        source,
    )
    (built,) = out.glob("automoe-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    call([*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(sdist)], out)
    (built,) = out.glob("automoe-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    call([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], target)
    return target


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as ``pip install --editable`` installs it, but into a folder of its own."""
    target = tmp_path_factory.mktemp("editable")
    build = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    call([sys.executable, "-c", build, str(target)], source)
    (built,) = target.glob("automoe-*.whl")
    zipfile.ZipFile(built).extractall(target)
    # Python reads .pth files in site folders alone, and one that it has read may name another checkout.
    first = f"import site, sys\nold = list(sys.path)\nsite.addsitedir({str(target)!r})\n"
    (target / "sitecustomize.py").write_text(first + "sys.path[:0] = [one for one in sys.path if one not in old]\n")
    return target


def test_the_sdist_has_what_its_tests_and_pages_need(sdist: Path) -> None:
    """All that a clone has but the files of its own upkeep."""
    named = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    tracked = {path.name for path in CHECKOUT.iterdir() if not path.name.startswith(".")}
    included = {name for name in named["include"] if not name.startswith(".")}
    built = {"build", "dist", "plans", "runs", "site", "outputs", "multirun"}
    assert tracked - {"LICENSE", "pyproject.toml"} - built == included  # those two are always packed
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "conf/model/small_dsv3.yaml", "recipes/pretrain.py"} <= packed
    assert not [name for name in packed if "__pycache__" in name or name.startswith((".venv", "runs"))]


def test_the_wheel_has_every_module_config_and_recipe(wheel: Path, source: Path) -> None:
    files = [path.relative_to(source) for room in ROOMS for path in (source / room).rglob("*") if path.is_file()]
    expected = {path.as_posix() if path.parts[0] == "automoe" else f"automoe/{path.as_posix()}" for path in files}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {"automoe/recipes/pretrain.py", "automoe/conf/model/small_dsv3.yaml"} <= packed


@pytest.mark.exhaustive
def test_the_wheel_trains_outside_a_checkout(installed: Path, tmp_path: Path) -> None:
    assert package_folder(tmp_path, installed) == installed / "automoe"
    said = train(tmp_path, installed, *TINY, "observe.report=true")
    assert "note: recipe=" not in said
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    assert "recipe: pretrain\n" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.faults
def test_an_installed_checkout_trains_with_a_copied_recipe(editable: Path, source: Path, tmp_path: Path) -> None:
    """``./recipes/pretrain.py`` of the working directory runs where ``recipe=pretrain`` is typed, and the run says so."""
    assert package_folder(tmp_path, editable) == source / "automoe"
    call([sys.executable, "-m", "automoe.cli", "recipe", "copy", "pretrain"], tmp_path, editable)
    copy = tmp_path / "recipes" / "pretrain.py"
    copy.write_text(copy.read_text() + "\nprint('the copy runs', flush=True)\n")
    said = train(tmp_path, editable, "recipe=pretrain", *TINY)
    assert f"note: recipe=pretrain is {copy}" in said and "the copy runs" in said
    assert f"recipe: {copy}\n" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.faults
def test_a_bare_checkout_trains(source: Path) -> None:
    assert package_folder(source, None) == source / "automoe"
    assert "note: recipe=" not in train(source, None, *TINY)


def test_the_console_script_lists_its_commands(installed: Path, tmp_path: Path) -> None:
    text = call([str(installed / "bin" / "automoe"), "--help"], tmp_path, installed)
    for command in ("train", "plan", "verify", "export", "recipe"):
        assert command in text
    assert "pretrain" in call([str(installed / "bin" / "automoe"), "recipe", "list"], tmp_path, installed)
