"""A run directory or a sweep with any one of its files damaged goes on rightly, or says what is wrong with which file.

``AUTOMOE_SAMPLE_SEED`` draws the byte that flips, and its bit.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from automoe.launch.run_dir import read_status
from automoe.storage.sealed import read_json
from benchmarks.trajectories import hash_tensors
from tests.support.command import FAULTY_RECIPE, ROOT, TINY, TrainCommand
from tests.support.forked import Forks, forks
from tests.support.sampling import sample_seed

pytestmark = pytest.mark.faults

DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path: flip(path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "unreadable": lambda path: path.chmod(0),
}
# One rank, and one file of text: the library's sources are thousands.
QUICK = (*TINY, "mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "data.kind=text", f"data.path={ROOT / 'README.md'}")
JOB = (*QUICK, "train.steps=6", "checkpoint.every=2")
STEP = ("manifest.json", ".metadata", "__0_0.distcp")
# Every file that a run leaves which was killed in its sixth step: those that going on reads, and the others.
READ = ("config.yaml", "status.json", "metrics.jsonl", "expert_load.jsonl", ".lock", "checkpoints/LATEST")
READ += tuple(f"checkpoints/step-4/{name}" for name in STEP)
UNREAD = ("first_error.json", "environment.json", "logs/rank0.log", "logs/rank0.pid")
UNREAD += tuple(f"checkpoints/step-2/{name}" for name in STEP)
PICTURES = "loss throughput grad_norm learning_rate balance_loss expert_load expert_balance mesh"
DRAWN = ("report.html", *(f"plots/{name}.png" for name in PICTURES.split()))
RESUMED = [(file, damage) for file in READ for damage in DAMAGES]
RESUMED += [(" ".join(UNREAD), damage) for damage in DAMAGES if damage != "a folder"]
RESUMED += [(file, "a folder") for file in UNREAD]
REPORTED = [(file, damage) for file in (*READ[:4], "environment.json", " ".join(DRAWN)) for damage in DAMAGES]
EXPORTED = [(file, damage) for file in ("config.yaml", *READ[5:]) for damage in DAMAGES]
# Every file of a sweep and of one of its jobs.
SWEPT = ["sweep.json", "sweep.png", "multirun.yaml", ".lock", "jobs/steps2.json", "jobs/steps2.lock"]
SWEPT += ["steps2/config.yaml", "steps2/status.json"]
LEFT_BY_JOBS = [f"{name}/{file}" for name in ("steps2", "steps3") for file in ("logs/rank0.log", "logs/rank0.pid")]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes() or b"\n")
    draw = random.Random(f"{sample_seed()} {path.name}")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


class World(NamedTuple):
    """The process that forks; the folder of a run that was killed, and what the run left alone came to."""

    forks: Forks
    killed: Path
    record: list[dict[str, Any]]
    tensors: dict[str, str]

    def run(self, module: str, *arguments: str) -> tuple[int, str]:
        """Exit status, and all output with no line broken. Whatever happens, no traceback is for the user."""
        code, out, err = self.forks.run(module, *arguments)
        assert "Traceback" not in out + err, out + err
        return code, " ".join((out + err).split())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("damaged")
    command = TrainCommand(folder / "straight")
    with forks(folder, command.env | {"XDG_CACHE_HOME": str(folder / "cache")}) as started:
        code, _, err = started.run("automoe.train", f"run_dir={command.run_dir}", *JOB)
        assert code == 0, err
        killed = folder / "killed"
        options = (f"run_dir={killed}", *JOB, "observe.report=true", f"recipe={FAULTY_RECIPE}")
        code, _, err = started.run("automoe.train", *options, env={"AUTOMOE_FAULT": "kill:at=forward:step=6"})
        assert code == 1 and "killed by SIGKILL" in err, err
        assert files_of(killed) == {*READ, *UNREAD, *DRAWN}
        yield World(started, killed, command.record(), tensors_of(command.run_dir))


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path) -> dict[str, str]:
    """Name -> hash of what is in every file; a damaged one counts by its name where it lies aside."""
    return {name: sha256((folder / name).read_bytes()).hexdigest() for name in files_of(folder)}


def tensors_of(run_dir: Path) -> dict[str, str]:
    return hash_tensors(run_dir / "checkpoints" / "step-6")


@pytest.fixture
def damaged(world: World, tmp_path: Path, file: str, damage: str) -> Path:
    """A copy of the run's folder with damaged files."""
    folder = shutil.copytree(world.killed, tmp_path / "run")
    for name in file.split():
        DAMAGES[damage](folder / name)
    return folder


def named(file: str, folder: Path, said: str) -> bool:
    """Whether the message has the name of the file, with its step's, or that its folder cannot be used."""
    path = folder / file
    if path.parent != folder and f"{path.parent} cannot be used" in said:
        return True
    step = path.parent.name if "step-" in file else ""
    return path.name in said and step in said and str(folder) in said


@pytest.mark.parametrize(("file", "damage"), RESUMED)
def test_a_run_goes_on_or_says_what_is_wrong(world: World, damaged: Path, file: str, damage: str) -> None:
    """Status 0: last tensors as if nothing had been, and every record; of lost ones the numbers are said.

    Another status: the file is named, and checkpoints and records are as they were.
    """
    before = contents(damaged)
    code, said = world.run("automoe.train", f"run_dir={damaged}", *JOB)
    if code == 0:
        assert read_status(damaged)["state"] == "done"
        assert tensors_of(damaged) == world.tensors
        lost = re.search(r"metrics\.jsonl: .*no record of steps: ([\d, -]+)", said)
        gone = steps_in(lost[1]) if lost else set()
        assert not gone or file == "metrics.jsonl"
        found, expected = TrainCommand(damaged).record(), [r for r in world.record if r["step"] not in gone]
        if file == "expert_load.jsonl":  # a thinned record
            found, expected = ([r | {"expert_load": None} for r in rows] for rows in (found, expected))
            assert damage in ("missing", "empty", "truncated") or "expert_load.jsonl: damaged lines" in said
        assert found == expected
    else:
        assert code in (1, 2) and "error: " in said
        assert file == "config.yaml" or named(file, damaged, said), said
        after = contents(damaged)
        kept = {name for name in before if name.startswith("checkpoints/") or name.endswith(".jsonl")}
        assert {name: after.get(name) for name in kept} == {name: before[name] for name in kept}


def steps_in(text: str) -> set[int]:
    """``3, 5-9`` as numbers."""
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in text.strip(" ,").split(", ")]
    return {step for first, last in ends for step in range(int(first), int(last) + 1)}


@pytest.mark.parametrize(("file", "damage"), REPORTED)
def test_a_report_is_drawn_or_says_what_is_wrong(world: World, damaged: Path, file: str, damage: str) -> None:
    code, said = world.run("automoe.observe.report", str(damaged))
    if code == 0:
        page = (damaged / "report.html").read_text()
        assert page.rstrip().endswith("</html>")
        told = file == "config.yaml" or file == " ".join(DRAWN) or Path(file).name in said
        assert told or damage in ("missing", "empty", "truncated"), said
    else:
        assert code == 1 and any(Path(name).name in said for name in file.split()), said


@pytest.mark.parametrize(("file", "damage"), EXPORTED)
def test_an_export_is_right_or_says_what_is_wrong(
    world: World, damaged: Path, tmp_path: Path, file: str, damage: str
) -> None:
    code, said = world.run("automoe.export", str(damaged), "--out", str(tmp_path / "out"))
    if code == 0:
        right = tmp_path.parent / "exported"
        if not right.exists():
            assert world.run("automoe.export", str(world.killed), "--out", str(right))[0] == 0
        assert contents(tmp_path / "out") == contents(right)
    else:
        assert code == 2 and not (tmp_path / "out").exists()
        assert file == "config.yaml" or named(file, damaged, said), said


@pytest.fixture(scope="module")
def sweep(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    code, said = world.run("automoe.train", *swept(folder))
    assert code == 0, said
    other = {"steps3/config.yaml", "steps3/status.json", "jobs/steps3.json", "jobs/steps3.lock"}
    locks = {"steps2/.lock", "steps3/.lock"}
    assert files_of(folder) == {*SWEPT, *LEFT_BY_JOBS} | other | locks
    return folder


def swept(folder: Path) -> list[str]:
    recipe = ROOT / "tests" / "launch" / "recipes" / "recipe_answers.py"
    return [f"run_dir={folder}", "-m", "train.steps=2,3", f"recipe={recipe}", *QUICK]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", SWEPT)
def test_a_sweep_has_the_right_results_or_says_what_is_wrong(
    world: World, sweep: Path, tmp_path: Path, file: str, damage: str
) -> None:
    folder = shutil.copytree(sweep, tmp_path / "sweep")
    DAMAGES[damage](folder / file)
    code, said = world.run("automoe.train", *swept(folder))
    if code == 0:
        jobs = read_json(folder / "sweep.json")["jobs"]
        assert [(job["label"], job["state"], job["objective"]) for job in jobs] == [
            ("steps=2", "done", 2.0),
            ("steps=3", "done", 3.0),
        ]
    else:
        assert code in (1, 2) and "error: " in said
        assert Path(file).name in said or (file == "steps2/config.yaml" and "steps2" in said), said
