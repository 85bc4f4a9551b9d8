"""Whichever file a run writes finds no room or a broken disk: it is named, with what is missing, and nothing is lost.

The files are those that a small run was seen to write, so that one that comes to them is tried too.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from automoe.launch.run_dir import read_status
from benchmarks.trajectories import hash_tensors
from tests.support.command import FAULTY_RECIPE, ROOT, TINY, TrainCommand
from tests.support.disk_faults import Disk, Written
from tests.support.forked import Forks, forks

pytestmark = pytest.mark.faults

JOB = (*TINY, "mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "data.kind=text", f"data.path={ROOT / 'README.md'}")
JOB += ("train.steps=3", "checkpoint.every=2")


class World(NamedTuple):
    """The process that forks, the disk that it sees, and what a run left alone wrote and came to."""

    forks: Forks
    disk: Disk
    straight: Path
    written: list[Written]

    def train(self, run_dir: Path, *options: str, cache: Path | None = None, **env: str) -> tuple[int, str]:
        cache = cache or self.straight.parent / "cache"
        words = (f"run_dir={run_dir}", *JOB, *options)
        code, out, err = self.forks.run("automoe.train", *words, env={"XDG_CACHE_HOME": str(cache), **env})
        return code, out + err


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("disk")
    disk = Disk(folder)
    straight = folder / "straight" / "run"
    with forks(folder, TrainCommand(straight).env | disk.env) as started:
        found = World(started, disk, straight, [])
        code, said = found.train(straight, "observe.report=true", **disk.recording)
        assert code == 0, said
        found.written.extend(one for one in disk.recorded() if one.name not in ("straight", "stdout", "stderr"))
        names = {one.name for one in found.written}
        assert {"lock", "status.json", "config.yaml", "rank0.log", "rank0.pid", "tokens.bin", "meta.json"} < names
        assert {"metrics.jsonl", "environment.json", "manifest.json", "LATEST", "report.html", "loss.png"} < names
        yield found


def wrong(world: World, one: Written, number: int, call: str, once: bool, folder: Path) -> str:
    """What is not as it should be where this one file finds its disk so; "" where nothing is."""
    run_dir = folder / "run"
    cached = one.part in (other.part for other in world.written[: world.written.index(first_of_run(world))])
    env = world.disk.fault(one.part, number, call, folder / "once" if once else None)
    drawn = one.name.endswith((".png", ".html")) or one.name == "plots"
    report = f"observe.report={str(drawn).lower()}"
    code, said = world.train(run_dir, report, cache=folder / "cache" if cached else None, **env)
    if "Traceback" in said or re.search(r"\.py:\d+ in ", said):
        return f"code lines: {said}"
    told = one.name in said or (
        cached and f"{folder}/cache/automoe: the tokenised corpus cannot be written here" in said
    )
    told &= os.strerror(number) in said
    if number == errno.ENOSPC and call == "write" and not cached:
        told &= bool(
            re.search(
                r"\(\d[\d,]* bytes to write, \d[\d,]* bytes and \d[\d,]* files free\)|bytes could not be written"
                r"|no room for its last \d",
                said,
            )
        )
    if code == 0:
        if read_status(run_dir)["state"] != "done" or record(run_dir) != record(world.straight):
            return f"done, and not all is there: {said}"
        if hash_tensors(run_dir / "checkpoints" / "step-3") != hash_tensors(world.straight / "checkpoints" / "step-3"):
            return "other tensors"
        return "" if told else f"nothing is said: {said}"
    if not told or "error: " not in said:
        return f"it is not named with what is missing: {said}"
    if code == 1 and one.name != "status.json" and read_status(run_dir)["state"] != "failed":
        return f"status.json says {read_status(run_dir)}"
    kept = sorted(path.name for path in run_dir.glob("checkpoints/step-*"))
    if kept and f"checkpoints/{kept[-1]}" not in said:
        return f"what was kept is not said: {said}"
    if not once:
        code, said = world.train(run_dir, cache=folder / "cache" if cached else None)
        lost = one.name == "metrics.jsonl" and ("no record of steps" in said or "nothing is left to train" in said)
        if code or not (lost or record(run_dir) == record(world.straight)):
            return f"it does not go on once there is room: {said}"
        if not (run_dir / "checkpoints" / "step-3").is_dir():
            return "no checkpoint of the last step"
    return ""


def first_of_run(world: World) -> Written:
    return next(one for one in world.written if one.part == "/run")


def record(run_dir: Path) -> list[dict[str, Any]]:
    return [{"step": one["step"], "loss": one["loss"]} for one in TrainCommand(run_dir).record()]


@pytest.mark.parametrize(
    ("number", "call", "once"),
    [
        (errno.ENOSPC, "write", True),
        (errno.ENOSPC, "write", False),
        (errno.EIO, "write", False),
        (errno.ENOSPC, "open", False),
        (errno.EROFS, "open", True),
    ],
    ids=["full once", "full", "broken", "no more files", "read-only once"],
)
def test_each_file_that_a_run_writes(world: World, tmp_path: Path, number: int, call: str, once: bool) -> None:
    found, folder = {}, world.disk.log.parent
    for one in world.written:
        if one.is_folder and call == "write":  # its files are tried one by one
            continue
        here = folder / tmp_path.name / str(len(found))
        here.mkdir(parents=True)
        found[one.part] = wrong(world, one, number, "mkdir" if one.is_folder else call, once, here)
        shutil.rmtree(here)
    assert len(found) > 20
    failed = [f"{part}: {what}" for part, what in found.items() if what]
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("once", [True, False], ids=["once", "for ever"])
def test_the_status_at_the_end_has_no_room(world: World, tmp_path: Path, once: bool) -> None:
    """It is written where the old one lies; where that fails too, the objective is told, and there is no success."""
    cases = (("/.status.json.", errno.ENOSPC), ("status.json", errno.ENOSPC), ("status.json", errno.EIO))
    for at, (part, number) in enumerate(cases):
        folder = world.disk.log.parent / tmp_path.name / str(at)
        folder.mkdir(parents=True)
        run_dir = folder / "run"
        env = world.disk.fault(part, number, "write", folder / "once" if once else None, run_dir / "checkpoints/step-3")
        code, said = world.train(run_dir, **env)
        assert "Traceback" not in said and (run_dir / "checkpoints/step-3").is_dir()
        if once or part == "/.status.json.":
            assert code == 0 and read_status(run_dir)["state"] == "done", said
        else:
            said = " ".join(said.split())
            assert code == 1 and "the run is done, its objective " in said and os.strerror(number) in said
            assert "status.json" in said and "checkpoints/step-3" in said


def test_a_rank_that_is_killed_on_a_full_disk_is_started_again_and_the_status_is_right(world: World) -> None:
    for at, part in enumerate(("first_error.json", "/.status.json.", "status.json", "attempt-1", "run/")):
        folder = world.disk.log.parent / f"killed{at}"
        folder.mkdir()
        run_dir = folder / "run"
        call = "mkdir" if part == "attempt-1" else "write"
        env = world.disk.fault(part, errno.ENOSPC, call, since=run_dir / "checkpoints/step-2")
        env["AUTOMOE_FAULT"] = f"kill:at=forward:step=3:once={folder / 'killed'}"
        code, said = world.train(run_dir, "launch.max_restarts=1", f"recipe={FAULTY_RECIPE}", **env)
        assert "Traceback" not in said, said
        assert "attempt 1 failed after step 2: rank 0: LaunchError: killed by SIGKILL" in said, said
        assert "starting again from the newest checkpoint: restart 1 of at most 1" in said
        if part in ("first_error.json", "/.status.json.", "attempt-1"):
            assert code == 0 and read_status(run_dir)["state"] == "done", said
            assert record(run_dir) == record(world.straight)
        else:
            assert code == 1 and "No space left" in said and "checkpoints/step-2" in said
