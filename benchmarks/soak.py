"""Kill runs and commands at random moments, for as long as asked, and check that nothing is lost.

One job after the other, of eight kinds in turn: conversations, LoRA, preferences, a mixture upcycled from a dense
checkpoint; and DeepSeek-V3 in small from nothing, with its all-to-all and products of experts' gradients behind another micro-batch, with multi-token
prediction, with Muon and QK-clip, and in a V-shaped pipeline. A job trains and exports in its run, and then
``automoe export``, ``convert`` and (where it fits) ``upcycle`` make folders from it. Each kind has an uninterrupted job first. Then the same commands run again and again,
and each start is hit by SIGKILL at random moments: a rank, all ranks, the fork server, the launcher, or the command. Half of
the starts save in the background, and half may start their ranks again (``launch.max_restarts``). Three of four
moments are drawn from the time that training takes, which is short compared with the time to start a small job. After
every start no process may be left and the record so far must be the uninterrupted one's to the bit; at the end the whole
record must, every tensor of the last checkpoint, and every byte of the exported and converted folders.

    make soak                                  # ten minutes; writes benchmarks/results/soak.json
    make soak SOAK_SECONDS=3600 SOAK_SEED=7    # the same victims again, at the same fractions of a run

Exit status 1 where anything was lost or left behind; the run directory is kept then.
"""

from __future__ import annotations

import argparse
import hashlib
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
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measuring import commit  # noqa: E402
from trajectories import hash_tensors  # noqa: E402

from tests.support.chat import messages, save_tokenizer, write_chat  # noqa: E402
from tests.support.command import MESHES, PATIENCE_S, TrainCommand, kill  # noqa: E402
from tests.support.hf_models import save_small_hf  # noqa: E402
from tests.support.preference import write_pairs  # noqa: E402

STEPS, EVERY = 24, 3
KILLS_A_JOB = 18  # of training; then a start is let alone, so that every kind has its turn on a slow machine too
KILLS_A_COMMAND = 1
RESTARTS = 8
IN_TRAINING = 0.75  # share of the moments that are counted from the start of training
VICTIMS = ("a rank", "all ranks", "the fork server", "the launcher")
COMMON = (
    f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "train.seq_len=128", "train.global_batch_size=8",
    "train.micro_batch_size=2", "train.val_every=0", "data.val_fraction=0.0", "optim.warmup_steps=2",
    "optim.ema_decay=0.9", "moe.global_balance_coef=0.01", "observe.report=false", "launch.device=cpu",
)  # fmt: skip
CHAT = ("data=chat", "data.path={folder}/chats.jsonl", "model.hf_path={folder}/moe")
PAIRS = ("recipe=dpo", "data=preference", "data.path={folder}/pairs.jsonl", "model.hf_path={folder}/moe")
UPCYCLED = (
    *CHAT[:2], "model.hf_path={folder}/dense", "model.upcycle=true", "model.num_experts=4",
    "model.num_experts_per_token=2", "model.moe_intermediate_size=48",
)  # fmt: skip
TEXT = (
    "data=text", "data.path={folder}/text.txt", "model=small_dsv3", "model.hidden_size=64", "model.intermediate_size=96",
    "model.moe_intermediate_size=32", "train.micro_batch_size=1",
)  # fmt: skip
INTERLEAVED = ("parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2")
MERGED = ("parallel.overlap_all_to_all=true", "parallel.expert_wgrad=delayed", "moe.experts=grouped_mm")
MUON = ("optim=muon", "optim.qk_clip=2.0")
APART = ("model.num_layers=5", "parallel.layout=Ett|tt|tm|L")
KINDS = {  # kind -> mesh, overrides
    "sft": ("pp2-dp2-ep2", CHAT),
    "lora": ("dp4-ep4", (*CHAT, "lora.rank=4", "lora.dropout=0.1")),
    "dpo": ("pp2-dp2-ep2", PAIRS),
    "upcycle": ("cp2-ep2", UPCYCLED),
    "merged": ("pp2-dp2-ep2", (*TEXT, *MERGED, *INTERLEAVED, "model.num_mtp_layers=1")),
    "mtp": ("cp2-ep2", (*TEXT, "model.num_mtp_layers=2")),
    "muon": ("dp4-ep4", (*TEXT, *MUON)),
    "v": (
        "pp2-dp2-ep2",
        (
            *TEXT,
            *MUON,
            "parallel.schedule=ZBVZeroBubble",
            "parallel.stages_per_rank=2",
            "model.num_mtp_layers=1",
            *APART,
        ),
    ),
}
# Command -> its arguments; {out} is the folder that it makes.
COMMANDS = {
    "export": ("{run}", "--out", "{out}", "--ema"),
    "convert": ("{run}/hf", "--out", "{out}", "--fp8"),
    "upcycle": ("{folder}/dense", "--out", "{out}", "--experts", "4", "--top-k", "2"),
}


class Lost(AssertionError):
    """A promise that did not hold."""


@dataclass
class Kill:
    """One SIGKILL: whom, how long after the start, whether that start trained by then, and what was there then."""

    kind: str
    mesh: str
    async_save: bool
    victim: str
    seconds: float
    training: bool
    recorded_steps: int
    newest_checkpoint: str | None


@dataclass
class Job:
    """The commands of one kind, in folders of their own."""

    kind: str
    folder: Path  # of the checkpoints and texts that all jobs read
    run_dir: Path

    @property
    def mesh(self) -> str:
        return KINDS[self.kind][0]

    def train(self) -> TrainCommand:
        mesh, settings = KINDS[self.kind]
        words = [word.format(folder=self.folder) for word in (*MESHES[mesh], *COMMON, *settings)]
        return TrainCommand(self.run_dir, words, {"XDG_CACHE_HOME": str(self.folder / "cache")})

    def commands(self) -> list[str]:
        return [name for name in COMMANDS if name != "upcycle" or self.kind == "upcycle"]

    def out(self, name: str) -> Path:
        """The folder that a command makes, alone in another one."""
        return self.run_dir.with_name(f"{self.run_dir.name}-{name}") / "hf"

    def start(self, name: str) -> subprocess.Popen[str]:
        self.out(name).parent.mkdir(exist_ok=True)
        places = {"run": self.run_dir, "folder": self.folder, "out": self.out(name)}
        words = [word.format_map(places) for word in COMMANDS[name]]
        return subprocess.Popen(
            [sys.executable, "-m", f"automoe.{name}", *words],
            env=self.train().env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


@dataclass
class Straight:
    """A job left alone: its record, what it leaves, and the seconds that its parts took."""

    record: list[dict[str, Any]]
    left: dict[str, str]
    seconds: float
    training_seconds: float
    command_seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Soak:
    """What was drawn and found so far."""

    draw: random.Random
    seconds: float
    most_kills: int
    started: float = field(default_factory=time.monotonic)
    kills: list[Kill] = field(default_factory=list)
    straight: dict[str, Straight] = field(default_factory=dict)

    def is_over(self) -> bool:
        return time.monotonic() - self.started > self.seconds or len(self.kills) >= self.most_kills

    def add(self, kill: Kill) -> None:
        self.kills.append(kill)
        where = f"{kill.recorded_steps} steps, {kill.newest_checkpoint}"
        print(
            f"soak: kill {len(self.kills)}: {kill.kind}, {kill.victim} after {kill.seconds:.1f} s, {where}", flush=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS", "600")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SOAK_SEED", str(time.time_ns() % 10**6))))
    parser.add_argument("--kills", type=int, default=10**9, help="leave off after this many")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "soak.json")
    args = parser.parse_args()
    print(f"soak: seed {args.seed}, {args.seconds:.0f} s", flush=True)
    at, load = commit(), os.getloadavg()
    soak = Soak(random.Random(args.seed), args.seconds, args.kills)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    write_sources(folder)
    problem, finished = None, 0
    try:
        while not soak.is_over():
            kind, before = args.kinds[finished % len(args.kinds)], len(soak.kills)
            if kind not in soak.straight:
                soak.straight[kind] = uninterrupted(Job(kind, folder, folder / f"straight-{kind}"))
            interrupted(Job(kind, folder, folder / f"run-{finished}"), soak)
            finished += 1
            print(f"soak: job {finished}, {kind}, done after {len(soak.kills) - before} kills", flush=True)
    except Lost as error:
        problem = str(error)
        print(f"soak: {problem}\nsoak: kept in {folder}", flush=True)
    kills = soak.kills
    compared = [soak.straight[args.kinds[job % len(args.kinds)]].left for job in range(finished)]
    report = {
        "what": "runs and commands killed at random; records, last checkpoints and folders compared with those of "
        "uninterrupted ones, to the bit",
        "seed": args.seed,
        "commit": at,
        "seconds": round(time.monotonic() - soak.started),
        "load_average_before": load,
        "cores": os.cpu_count(),
        "torch": version("torch"),
        "steps_per_job": STEPS,
        "checkpoint_every": EVERY,
        "jobs_finished": finished,
        "tensors_compared": sum(not name.startswith("file ") for left in compared for name in left),
        "files_compared": sum(name.startswith("file ") for left in compared for name in left),
        "num_kills": len(kills),
        "kills_by_kind": Counter(one.kind for one in kills),
        "kills_by_victim": Counter(one.victim for one in kills),
        "kills_by_mesh": Counter(one.mesh for one in kills),
        "kills_with_async_saves": sum(one.async_save for one in kills),
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


def write_sources(folder: Path) -> None:
    """A mixture, a dense checkpoint, conversations and pairs, small."""
    for name, model in (("moe", "qwen3_moe"), ("dense", "qwen3")):
        sizes = {"vocab_size": 304, "num_hidden_layers": 2, "intermediate_size": 48}
        save_small_hf(model, folder / name, other_sizes=sizes)
        save_tokenizer(folder / name, "chatml")
    write_chat(folder / "chats.jsonl", [messages(f"What is {n}?", f"It is {n * n}.") for n in range(200)])
    write_pairs(folder / "pairs.jsonl", 64)
    (folder / "text.txt").write_text("\n\n".join(f"{n} squared is {n * n}, and {n} cubed {n**3}." for n in range(4000)))


# Jobs
# ---------------------------------------------------------------------------------------------------------------------


def uninterrupted(job: Job) -> Straight:
    command, began = job.train(), time.monotonic()
    watch = TrainingWatch(command)
    process = command.start()
    watch.wait(process)
    trains = time.monotonic()
    while watch.num_steps() < STEPS and process.poll() is None:
        time.sleep(0.1)
    trained = time.monotonic()
    _, err = process.communicate(timeout=PATIENCE_S)
    ended = time.monotonic()
    if process.returncode:
        raise Lost(f"{job.kind}: the uninterrupted run ended with status {process.returncode}: {err}")
    found = Straight(command.record(), {}, ended - began, trained - trains)
    assert len(found.record) == STEPS
    for name in job.commands():
        began = time.monotonic()
        output = (process := job.start(name)).communicate(timeout=PATIENCE_S)[0]
        if process.returncode:
            raise Lost(f"{job.kind}: {name} ended with status {process.returncode}: {output}")
        found.command_seconds[name] = time.monotonic() - began
    found.left = left_by(job)
    return found


def interrupted(job: Job, soak: Soak) -> None:
    """Start, kill and start again, until everything is done, and compare."""
    train_until_done(job, soak)
    for name in job.commands():
        repeat_until_done(job, name, soak)
    left, expected = left_by(job), soak.straight[job.kind].left
    if differing := sorted(k for k in left | expected if left.get(k) != expected.get(k)):
        listed = f"{len(differing)} of {len(expected)} tensors and files differ: {', '.join(differing[:5])}"
        raise Lost(f"{job.kind}: what is left is not what the uninterrupted job leaves, {listed}")


def left_by(job: Job) -> dict[str, str]:
    """Name -> digest of every tensor of the last checkpoint, and of every file of the folders that were made."""
    left = hash_tensors(job.run_dir / "checkpoints" / f"step-{STEPS}")
    folders = {name: job.out(name).parent for name in job.commands()} | {"run": job.run_dir / "hf"}
    for name, folder in folders.items():
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            left[f"file {name}/{path.relative_to(folder)}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return left


def train_until_done(job: Job, soak: Soak) -> None:
    command, straight = job.train(), soak.straight[job.kind]
    limit = len(soak.kills) + KILLS_A_JOB

    def let_alone() -> bool:
        return soak.is_over() or len(soak.kills) >= limit

    while True:
        victims, status, output = one_start(job, command, soak, let_alone)
        command.wait_until_gone()
        record = command.record()
        if record != straight.record[: len(record)]:
            step = next(a["step"] for a, b in zip(record, straight.record, strict=False) if a != b)
            raise Lost(f"{job.kind}: step {step} differs from the uninterrupted run's, after {victims} were killed")
        if status == 0:
            if record != straight.record:
                raise Lost(f"{job.kind}: the run is done with {len(record)} of {STEPS} steps recorded")
            return
        if not victims or status not in (1, -9):
            raise Lost(f"{job.kind}: ended with status {status}, killed: {victims or 'nobody'}: {output[-2000:]}")


def one_start(job: Job, command: TrainCommand, soak: Soak, let_alone: Callable[[], bool]) -> tuple[list[str], int, str]:
    """A start of the run that is hit once, or more often where it may start its ranks again.

    Returns:
        who was killed, the exit status, and standard output.
    """
    draw, straight = soak.draw, soak.straight[job.kind]
    async_save, restarts = draw.random() < 0.5, draw.choice((0, RESTARTS))
    began, victims = time.monotonic(), []
    watch = TrainingWatch(command)
    process = command.start(f"checkpoint.async_save={async_save}".lower(), f"launch.max_restarts={restarts}")
    while len(victims) <= restarts and not let_alone():
        in_training, moment, drawn, pick = (
            draw.random() < IN_TRAINING,
            draw.random(),
            draw.choice(VICTIMS),
            draw.random(),
        )
        delay = (0.1 + 0.9 * moment) * straight.seconds
        if in_training:
            watch.wait(process)
            delay = moment * straight.training_seconds
        try:
            output = process.communicate(timeout=delay)[0]
            return victims, process.returncode, output
        except subprocess.TimeoutExpired:
            seconds, training = time.monotonic() - began, watch.trains()
            if victim := strike(command, process, drawn, pick):
                victims.append(victim)
                steps = [int(path.name.removeprefix("step-")) for path in command.run_dir.glob("checkpoints/step-*")]
                newest = f"step-{max(steps)}" if steps else None
                taken = watch.num_steps()
                soak.add(Kill(job.kind, job.mesh, async_save, victim, round(seconds, 2), training, taken, newest))
            watch = TrainingWatch(command)
    try:
        output = process.communicate(timeout=PATIENCE_S)[0]
    except subprocess.TimeoutExpired:
        raise Lost(f"{job.kind}: processes {command.pids()} outlive their run, {victims} killed") from None
    return victims, process.returncode, output


def strike(command: TrainCommand, process: subprocess.Popen[str], victim: str, pick: float) -> str | None:
    """Kill ``victim``, or the launcher where there is none yet.

    Returns:
        who it was; None if the run ended in this very moment.
    """
    ranks = command.rank_pids()
    chosen = {
        "a rank": ranks[int(pick * len(ranks)) :][:1],
        "all ranks": ranks,
        "the fork server": [pid for pid in command.pids() if serves(pid, process.pid)],
        "the launcher": [],
    }[victim]
    if not chosen:
        victim, chosen = VICTIMS[-1], [process.pid]
    return victim if any([kill(pid) for pid in chosen]) else None


def serves(pid: int, launcher: int) -> bool:
    """Whether a process is the fork server of ``launcher``; its ranks have the same command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False
    return b"automoe.launch.fork_server" in words and int(parent) == launcher


def repeat_until_done(job: Job, name: str, soak: Soak) -> None:
    """A command that makes a folder, killed and given again until the folder is there."""
    for attempt in range(KILLS_A_COMMAND + 1):
        process, moment = job.start(name), soak.draw.random()
        alone = soak.is_over() or attempt == KILLS_A_COMMAND
        delay = moment * soak.straight[job.kind].command_seconds[name]
        try:
            output = process.communicate(timeout=PATIENCE_S if alone else delay)[0]
        except subprocess.TimeoutExpired:
            kill(process.pid)
            output = process.communicate(timeout=PATIENCE_S)[0]
            if process.returncode == -9:
                soak.add(Kill(job.kind, job.mesh, False, f"automoe {name}", round(delay, 2), False, STEPS, None))
        job.train().wait_until_gone()
        if job.out(name).exists():  # whole, as the comparison will say
            return
        if process.returncode != -9:
            raise Lost(f"{job.kind}: {name} ended with status {process.returncode}: {output[-2000:]}")


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

    def num_steps(self) -> int:
        """Lines of the record so far."""
        return self.path.read_bytes().count(b"\n") if self.path.exists() else 0

    def _touched(self) -> int | None:
        return self.path.stat().st_mtime_ns if self.path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
