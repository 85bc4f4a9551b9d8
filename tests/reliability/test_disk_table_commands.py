"""Each file that ``convert``, ``export`` and a run over preferences write finds no room, or a broken disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import TINY, TrainCommand
from tests.support.disk_faults import Disk, Written
from tests.support.forked import Forks, forks
from tests.support.hf_models import save_small_hf

pytestmark = pytest.mark.faults

PAIRS = (
    *TINY, "mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "train.steps=1", "train.seq_len=256", "data.on_long=drop",
    "launch.num_ranks=1", "checkpoint.every=1",
)  # fmt: skip
FAULTS = [(errno.ENOSPC, "write"), (errno.EIO, "write"), (errno.ENOSPC, "open"), (errno.EROFS, "mkdir")]


class Commands:
    """Commands that write into a folder ``made``, and what each wrote when it was left alone."""

    def __init__(self, started: Forks, disk: Disk, folder: Path) -> None:
        self.forks, self.disk, self.folder = started, disk, folder
        self.written: dict[str, list[Written]] = {}

    def words(self, name: str, made: Path) -> tuple[str, ...]:
        return {
            "convert": ("automoe.convert", str(self.folder / "hf"), "--out", str(made), "--max-shard-gb", "1e-4"),
            "export": ("automoe.export", str(self.folder / "trained"), "--out", str(made)),
            "pairs": ("automoe.train", "--config-name", "dpo_small", f"run_dir={made}", *PAIRS),
        }[name]

    def run(self, name: str, made: Path, **env: str) -> tuple[int, str]:
        cache = {"XDG_CACHE_HOME": str(self.folder / "cache")}
        code, out, err = self.forks.run(*self.words(name, made), env=cache | env)
        return code, out + err


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("disk")
    disk = Disk(folder)
    save_small_hf("qwen3_moe", folder / "hf")
    with forks(folder, TrainCommand(folder / "trained").env | disk.env) as started:
        found = Commands(started, disk, folder)
        code, said = found.run("pairs", folder / "trained")
        assert code == 0, said
        for name in ("convert", "export", "pairs"):
            disk.log.unlink(missing_ok=True)
            made = folder / "straight" / name
            code, said = found.run(name, made, **disk.recording)
            assert code == 0, said
            kept = [one for one in disk.recorded() if one.name not in ("straight", "stdout", "stderr", name)]
            found.written[name] = kept
        assert {"reference.json"} < {one.name for one in found.written["pairs"]}
        assert {"config.json", "model.safetensors"} < {one.name for one in found.written["export"]}
        yield found


@pytest.mark.parametrize("name", ["convert", "export", "pairs"])
@pytest.mark.parametrize(("number", "call"), FAULTS, ids=["full", "broken", "no more files", "read-only"])
def test_each_file_of_a_command(commands: Commands, name: str, number: int, call: str, tmp_path: Path) -> None:
    """It is named, nothing half-written has the name that was asked for, and the command works once there is room."""
    failed = []
    for at, one in enumerate(commands.written[name]):
        if one.is_folder != (call == "mkdir"):
            continue
        if name == "pairs" and one.name != "reference.json":  # the others are those of every run
            continue
        made = commands.folder / tmp_path.name / str(at) / name
        made.parent.mkdir(parents=True)
        code, said = commands.run(name, made, **commands.disk.fault(one.part, number, call))
        wrong = "Traceback" in said or ".py:" in said
        if code == 0 or wrong or os.strerror(number) not in said or one.name not in said:
            failed.append(f"{one.part}: {code}: {said}")
        elif name != "pairs" and made.exists():
            failed.append(f"{one.part}: {sorted(made.rglob('*'))} is left")
        code, said = commands.run(name, made)
        if code:
            failed.append(f"{one.part}: then {said}")
        shutil.rmtree(made.parent)
    assert not failed, "\n\n".join(failed)
