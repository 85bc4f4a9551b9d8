"""Kill training runs at random moments, for as long as asked, and check that nothing is lost.

One job after the other, on meshes in turn: its uninterrupted record first, then the same command again and again,
each start killed by SIGKILL at a random moment (a rank, all ranks, or the launching process), until one comes to its
end. Three of four moments are drawn from the time that training takes, which is short compared with the time to start
a small job; the others from the whole run. After every kill no process may be left and the record so far must be the
uninterrupted one's to the bit; at the end the whole record must, and every tensor of the last checkpoint.

    make soak                                  # ten minutes; writes benchmarks/results/soak.json
    make soak SOAK_SECONDS=3600 SOAK_SEED=7    # the same victims again, at the same fractions of a run

Exit status 1 where anything was lost or left behind; the run directory is kept then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measuring import commit  # noqa: E402
from trajectories import hash_tensors  # noqa: E402

from tests.support.command import MESHES, PATIENCE_S, TINY, TrainCommand, kill  # noqa: E402

STEPS, EVERY = 24, 3
KILLS_A_JOB = 12  # then a start is let alone, so that every mesh has its turn on a slow machine too
IN_TRAINING = 0.75  # share of the moments that are counted from the start of training
VICTIMS = ("a rank", "all ranks", "the launcher")


class Lost(AssertionError):
    """A promise that did not hold."""


@dataclass
class Kill:
    """One SIGKILL: whom, how long after the start, whether that start trained by then, and what the record held."""

    mesh: str
    async_save: bool
    victim: str
    seconds: float
    training: bool
    recorded_steps: int
    newest_checkpoint: str | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS", "600")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SOAK_SEED", str(time.time_ns() % 10**6))))
    parser.add_argument("--kills", type=int, default=10**9, help="leave off after this many")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "soak.json")
    args = parser.parse_args()
    print(f"soak: seed {args.seed}, {args.seconds:.0f} s", flush=True)
    draw, kills, finished = random.Random(args.seed), [], 0
    started, load = time.monotonic(), os.getloadavg()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    problem = None
    straight: dict[str, Straight] = {}

    def time_is_up() -> bool:
        return time.monotonic() - started > args.seconds or len(kills) >= args.kills

    try:
        while not time_is_up():
            mesh = args.meshes[finished % len(args.meshes)]
            if mesh not in straight:
                straight[mesh] = uninterrupted(folder / f"straight-{mesh}", mesh)
            kills_before = len(kills)
            limit = kills_before + KILLS_A_JOB

            def let_alone(limit: int = limit) -> bool:
                return time_is_up() or len(kills) >= limit

            run_until_done(folder / f"run-{finished}", mesh, straight[mesh], draw, kills, let_alone)
            finished += 1
            print(f"soak: job {finished} on {mesh} done after {len(kills) - kills_before} kills", flush=True)
    except Lost as error:
        problem = str(error)
        print(f"soak: {problem}\nsoak: kept in {folder}", flush=True)
    report = {
        "what": "training runs killed at random; records and last checkpoints compared with those of uninterrupted runs, to the bit",
        "seed": args.seed,
        "commit": commit(),
        "seconds": round(time.monotonic() - started),
        "load_average_before": load,
        "cores": os.cpu_count(),
        "torch": version("torch"),
        "steps_per_job": STEPS,
        "checkpoint_every": EVERY,
        "jobs_finished": finished,
        "tensors_compared": sum(len(straight[args.meshes[job % len(args.meshes)]].tensors) for job in range(finished)),
        "num_kills": len(kills),
        "kills_by_victim": Counter(one.victim for one in kills),
        "kills_by_mesh": Counter(one.mesh for one in kills),
        "kills_of_starts_that_trained": sum(one.training for one in kills),
        "kills_before_the_first_recorded_step": sum(one.recorded_steps == 0 for one in kills),
        "lost": problem,
        "kills": [asdict(one) for one in kills],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"soak: {len(kills)} kills, {finished} jobs finished, {problem or 'nothing lost'}", flush=True)
    if problem is None:
        shutil.rmtree(folder)
    return int(problem is not None)


def job(run_dir: Path, mesh: str) -> TrainCommand:
    steps = (f"train.steps={STEPS}", f"checkpoint.every={EVERY}")
    cache = {"XDG_CACHE_HOME": str(run_dir.parent / "cache")}
    return TrainCommand(run_dir, (*TINY, *MESHES[mesh], *steps), cache)


@dataclass
class Straight:
    """A job left alone: its record, its last tensors, the seconds that it took, and those of them that it trained."""

    record: list[dict[str, Any]]
    tensors: dict[str, str]
    seconds: float
    training_seconds: float


def uninterrupted(run_dir: Path, mesh: str) -> Straight:
    command, began = job(run_dir, mesh), time.monotonic()
    watch = TrainingWatch(command)
    process = command.start()
    watch.wait(process)
    trains = time.monotonic()
    _, err = process.communicate(timeout=PATIENCE_S)
    ended = time.monotonic()
    if process.returncode:
        raise Lost(f"{mesh}: the uninterrupted run ended with status {process.returncode}: {err}")
    record = command.record()
    assert len(record) == STEPS
    return Straight(record, last_tensors(run_dir), ended - began, ended - trains)


def last_tensors(run_dir: Path) -> dict[str, str]:
    """Name -> digest of every tensor of the checkpoint that a finished job leaves."""
    return hash_tensors(run_dir / "checkpoints" / f"step-{STEPS}")


class TrainingWatch:
    """Whether a start, made after this object, has come to train: then it opens the run's record."""

    def __init__(self, command: TrainCommand) -> None:
        self.path = command.run_dir / "metrics.jsonl"
        self.before = self._touched()

    def trains(self) -> bool:
        return self._touched() != self.before

    def wait(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.trains() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _touched(self) -> int | None:
        return self.path.stat().st_mtime_ns if self.path.exists() else None


def run_until_done(
    run_dir: Path, mesh: str, straight: Straight, draw: random.Random, kills: list[Kill], let_alone: Callable[[], bool]
) -> None:
    """Start, kill and start again, until a start comes to its end; from ``let_alone`` on nothing is killed."""
    command, expected = job(run_dir, mesh), straight.record
    while True:
        async_save, in_training = draw.random() < 0.5, draw.random() < IN_TRAINING
        moment, drawn, pick = draw.random(), draw.choice(VICTIMS), draw.random()
        watch, began = TrainingWatch(command), time.monotonic()
        process = command.start(f"checkpoint.async_save={async_save}".lower())
        delay = (0.1 + 0.9 * moment) * straight.seconds
        if in_training:
            watch.wait(process)
            delay = moment * straight.training_seconds
        victim, seconds, training = "nobody", 0.0, False
        try:
            output = process.communicate(timeout=PATIENCE_S if let_alone() else delay)[0]
        except subprocess.TimeoutExpired:
            seconds, training = time.monotonic() - began, watch.trains()
            victim = strike(command, process, drawn, pick)
            try:
                output = process.communicate(timeout=PATIENCE_S)[0]
            except subprocess.TimeoutExpired:
                raise Lost(f"{mesh}: processes {command.pids()} outlive their run, {victim} killed") from None
        command.wait_until_gone()
        record = command.record()
        if record != expected[: len(record)]:
            step = next(a["step"] for a, b in zip(record, expected, strict=False) if a != b)
            raise Lost(f"{mesh}: step {step} differs from the uninterrupted run's, after {victim} was killed")
        if process.returncode == 0:
            if record != expected:
                raise Lost(f"{mesh}: the run is done with {len(record)} of {len(expected)} steps recorded")
            tensors = last_tensors(run_dir)
            differing = sorted(k for k in tensors | straight.tensors if tensors.get(k) != straight.tensors.get(k))
            if differing:
                listed = f"{len(differing)} of {len(straight.tensors)} tensors differ: {', '.join(differing[:5])}"
                raise Lost(f"{mesh}: the last checkpoint is not the uninterrupted run's, {listed}")
            return
        if victim == "nobody" or process.returncode not in (1, -9):
            raise Lost(f"{mesh}: ended with status {process.returncode}, {victim} killed: {output[-2000:]}")
        steps = [name for name in command.checkpoints() if name.startswith("step-")]
        newest = max(steps, key=lambda name: int(name.removeprefix("step-")), default=None)
        kills.append(Kill(mesh, async_save, victim, round(seconds, 2), training, len(record), newest))
        print(f"soak: kill {len(kills)}: {victim} after {seconds:.1f} s, {len(record)} steps, {newest}", flush=True)


def strike(command: TrainCommand, process: subprocess.Popen[str], victim: str, pick: float) -> str:
    """Kill ``victim``, or the launcher where ranks have not started yet; who it was, perhaps nobody."""
    ranks = command.rank_pids()
    chosen = {"a rank": ranks[int(pick * len(ranks)) :][:1], "all ranks": ranks, "the launcher": []}[victim]
    if not chosen:
        victim, chosen = VICTIMS[-1], [process.pid]
    return victim if any([kill(pid) for pid in chosen]) else "nobody"  # the run ended in this very moment


if __name__ == "__main__":
    sys.exit(main())
