"""The environment of ``make smoke-latest``: newest releases, also of what another package holds back."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "smoke" / "environment.py"


def wheel(folder: Path, name: str, number: str, needs: str = "") -> None:
    info = f"{name}-{number}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"number = '{number}'\n")
        needed = f"Requires-Dist: {needs}\n" if needs else ""
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{needed}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.faults  # seconds, most of them for the environment
def test_what_another_package_holds_back_is_the_newest_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("smoke_environment", SOURCE)
    assert spec is not None and spec.loader is not None
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    assert {"torch", "transformers", "datasets", "peft", "trl", "wandb"} <= set(environment.NEWEST)
    for number in ("1.0", "2.0"):
        wheel(tmp_path, "held", number)
    wheel(tmp_path, "holder", "1.0", "held<2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    environment.make(tmp_path / "latest", ["holder", "held"], [], ("held",))
    # The folder was renamed after the environment was made: its Python is called by its new path.
    code = "import held, holder; print(held.number, holder.number)"
    python = tmp_path / "latest" / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["2.0", "1.0"]
