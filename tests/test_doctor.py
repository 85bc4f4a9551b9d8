"""``automoe doctor``: a healthy machine has no problem, and each problem is named with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from automoe import doctor

Usage = namedtuple("Usage", "total used free")


def facts() -> dict[str, doctor.Fact]:
    return {fact.name: fact for fact in doctor.examine()}


def test_it_names_what_is_here_without_importing_torch() -> None:
    code = "import sys; from automoe.doctor import main; main([]); sys.exit('torch' in sys.modules)"
    env = os.environ | {"NCCL_SOCKET_IFNAME": "eth7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    for said in (
        "optional, here",
        "moe.experts=triton",
        "moe.dispatcher=deepep",
        "NCCL_SOCKET_IFNAME=eth7",
        "first command",
        "lo",
    ):
        assert said in done.stdout


@pytest.mark.parametrize(
    "where, value, name, remedy",
    [
        ("shutil.disk_usage", lambda path: Usage(2e9, 0, 1e9), "disk here", "free 5 GB"),
        ("resource.getrlimit", lambda which: (1024, 1024), "open files", "ulimit -Hn"),
        ("sys.platform", "darwin", "system", "container"),
        ("automoe.launch.hardware.visible_gpus", lambda: 8, "GPUs", "docs/install.md"),
        ("automoe.launch.hardware.NEWEST_TORCH_TRIED", "1.0", "torch", "newer than 1.0"),
    ],
)
def test_a_problem_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys, where: str, value: object, name: str, remedy: str
) -> None:
    before = facts()[name].problem
    monkeypatch.setattr("automoe.launch.hardware.torch_has_cuda", lambda: False)
    module = where if where.startswith("automoe") else f"automoe.doctor.{where}"
    monkeypatch.setattr(module, value)
    found = facts()[name]
    assert remedy in found.problem and found.problem != before
    assert doctor.main([]) == 1
    assert "PROBLEM" in capsys.readouterr().out


def test_a_machine_without_dev_shm_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/dev/shm" and real(path))
    assert facts()["/dev/shm"].value == "0.0 GB"


def test_the_first_command_depends_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, command in ((0, "automoe demo"), (1, "automoe doctor --gpu")):
        monkeypatch.setattr("automoe.launch.hardware.visible_gpus", lambda gpus=gpus: gpus)
        assert facts()["first command"].value == command


def test_variables_of_an_absent_launcher_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "launcher" not in facts()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "unset" in facts()["launcher"].problem


def test_a_cache_folder_that_does_not_exist_yet_is_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    assert facts()["disk of the cache"].value.endswith(str(tmp_path))


def test_of_a_package_that_is_there_twice_the_imported_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "transformers-99.9.dist-info").mkdir()
    (tmp_path / "transformers-99.9.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 99.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "transformers 99.9" in facts()["packages"].value


def install(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write what pip writes of a package that has no files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = "".join(f"Requires-Dist: {line}\n" for line in needs)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")


LINUX = "; platform_system == 'Linux'"


@pytest.mark.parametrize(
    "needs, triton, problem",
    [
        (f"triton==3.7.1{LINUX} and python_version < '4'", ("triton", "3.9.0"), "triton==3.7.1 and finds 3.9.0"),
        (f"triton<3.8,>=3.7{LINUX}", ("triton", "3.6.0"), "triton<3.8,>=3.7 and finds 3.6.0"),
        ("pytorch-triton==3.8.0+git1", ("pytorch_triton", "3.7.0"), "pytorch-triton==3.8.0+git1 and finds 3.7.0"),
        ("pytorch-triton==3.6.0", ("triton", "3.6.0"), "pytorch-triton==3.6.0 and finds none"),
        ("triton==3.7.1", ("triton", "3.7.1+local"), ""),
        ("triton==3.7.1; platform_system == 'Windows'", ("triton", "3.9.0"), ""),
        ("triton==3.7.1; extra == 'kernels'", ("triton", "3.9.0"), ""),
        ("sympy", ("triton", "3.9.0"), ""),  # a CPU build
    ],
)
def test_a_triton_that_torch_does_not_ask_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str, triton: tuple[str, str], problem: str
) -> None:
    install(tmp_path, "torch", "2.13.0", "filelock", needs)
    install(tmp_path, *triton)
    monkeypatch.syspath_prepend(tmp_path)
    said = facts()["packages"].problem
    assert (problem in said and "pip install" in said) if problem else said == ""
