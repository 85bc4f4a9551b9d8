"""What a user waits for: short runs from the command to their end, the documented commands, the default training run.

Short runs are three steps of a small model on one, two and four gloo ranks, and a sweep of four jobs, on this checkout in
turns with another commit of it: almost all of it is the start, and the report at the end. ``one step`` ends with the first
step, without a report, and ``41 steps`` takes 40 more: their difference is the training step, ``cpu_seconds_per_step``. Token caches are warm. ``--job``
times the documented commands and the default run instead, which begins with an empty token cache, as a user's first one
does. ``HF load`` starts from a checkpoint of 52 million parameters, ``checkpoint load`` from a run that has nothing left to
train; both are written once, by this checkout. Seconds are from the start of a process to its end, or to a line in
``metrics.jsonl``; CPU-seconds are those of the process and all that it started, and peak memory is that of the largest of
them.

    python benchmarks/starts.py --before HASH      # five minutes; writes benchmarks/results/starts.json
    python benchmarks/starts.py --rounds 1         # this checkout alone, once
    python benchmarks/starts.py --job              # minutes, on a machine at rest; writes benchmarks/results/main_job.json
    python benchmarks/starts.py --job --quick      # a small run of a few steps: checks the script itself
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from measuring import HERE, commit, cpu_model

GOAL = 3.0  # validation bits per byte
POLL_S = 0.02  # a step of the default run takes several times longer
TIMEOUT_S = 3600
# Small enough for a test: few steps of a small model on two ranks.
QUICK = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "data.max_bytes=100000",
    "train.steps=4",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.val_every=2",
    "train.val_batches=1",
    "launch.num_ranks=2",
    "mesh.pp=1",
)
COMMANDS = {  # name -> arguments of python -m, and the exit status that is right
    "train --help": (("automoe.cli", "train", "--help"), 0),
    "config error": (("automoe.train", "run_dir={tmp}/refused", "mesh.ep=3"), 2),
    "plan": (("automoe.plan", "--config-name", "dsv3_671b"), 0),
    "plan --build": (("automoe.plan", "--config-name", "dsv3_671b", "--build"), 0),
}
RUN = ("experiment=smoke", "mesh=fsdp", "train.global_batch_size=8", "launch.device=cpu")
FEW = (*RUN, "launch.num_ranks=1", "observe.report=false")
LARGER = ("model=small_qwen3_moe", "model.hidden_size=512", "model.moe_intermediate_size=512", "train.steps=1")
# name -> what stands behind ``automoe train``, or another command with all of its words
CASES = {
    "the first command": ("train.steps=1",),
    "verify": ("automoe.cli", "verify", "mesh.pp=1", "mesh.ep=4"),
    "HF load": (*FEW, "train.steps=1", "model.hf_path={larger}/hf", "data=stdlib"),
    "checkpoint load": (*FEW, *LARGER, "run_dir={larger}"),
    "one step": (*FEW, "train.steps=1"),
    "41 steps": (*FEW, "train.steps=41"),
    "one rank": (*RUN, "launch.num_ranks=1"),
    "two ranks": (*RUN, "launch.num_ranks=2"),
    "two ranks, no report": (*RUN, "launch.num_ranks=2", "observe.report=false"),
    "four ranks": (*RUN, "launch.num_ranks=4"),
    "a sweep of four jobs of two ranks": (
        "-m",
        *RUN,
        "launch.num_ranks=2",
        "mesh.ep=1,2",
        "train.micro_batch_size=1,2",
    ),
}


@dataclass
class Timed:
    """One process: wall seconds, CPU seconds of it and of every child that it waited for, the largest one's memory."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass
class Run:
    """The default run. Seconds count from the start of the launching process.

    Attributes:
        seconds_to_first_step: until the first line of ``metrics.jsonl``.
        seconds_to_goal: until the first validation below ``GOAL`` bits per byte; None if none was.
        bits_per_byte: of every validation, [step, seconds, bits per byte].
        final_bits_per_byte: of the last one.
    """

    steps: int
    seconds_to_first_step: float
    seconds_to_goal: float | None
    final_bits_per_byte: float
    seconds: float
    cpu_seconds: float
    bits_per_byte: list[tuple[int, float, float]]


class Command:
    """``python -m`` of some arguments, started in ``tmp`` with the files in ``root`` and a cache in ``tmp``."""

    def __init__(self, arguments: tuple[str, ...], tmp: Path, root: Path = HERE.parent) -> None:
        self.arguments, self.output = arguments, tmp / "output.txt"
        environment = os.environ | {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(tmp / "cache")}
        self.started = time.perf_counter()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=tmp,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started

    def ended(self, status: int = 0, wait: bool = True) -> Timed | None:
        """What it took; None while it runs and ``wait`` is false. Exits where the exit status is not ``status``."""
        pid, code, usage = os.wait4(self.process.pid, 0 if wait else os.WNOHANG)
        if not pid:
            return None
        timed = Timed(self.seconds(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
        self.process.returncode = os.waitstatus_to_exitcode(code)
        if self.process.returncode != status:
            raise SystemExit(
                f"python -m {' '.join(self.arguments)} left with {self.process.returncode}, not {status}. "
                f"Nothing was written. It printed:\n{self.output.read_text()}"
            )
        return timed


def time_command(name: str, tmp: Path) -> Timed:
    arguments, status = COMMANDS[name]
    timed = Command(tuple(argument.format(tmp=tmp) for argument in arguments), tmp).ended(status)
    assert timed is not None
    return timed


def time_run(tmp: Path, overrides: tuple[str, ...] = ()) -> Run:
    """The default run to its end; its record is read as it grows."""
    run_dir = tmp / "run"
    command = Command(("automoe.train", f"run_dir={run_dir}", *overrides), tmp)
    record, unread = run_dir / "metrics.jsonl", b""
    first: float | None = None
    validations: list[tuple[int, float, float]] = []
    steps = offset = 0
    timed = None
    try:
        while timed is None:
            time.sleep(POLL_S)
            timed = command.ended(wait=False)  # before reading: its last lines are there when it has ended
            if timed is None and command.seconds() > TIMEOUT_S:
                raise SystemExit(f"the run took over {TIMEOUT_S} s. Nothing was written")
            if not record.exists():
                continue
            now = command.seconds()
            with record.open("rb") as file:
                file.seek(offset)
                unread += (grown := file.read())
            offset += len(grown)
            *lines, unread = unread.split(b"\n")
            for line in lines:
                step = json.loads(line)
                steps = step["step"]
                first = first if first is not None else now
                if "val_bits_per_byte" in step:
                    validations.append((steps, now, float(step["val_bits_per_byte"])))
    finally:
        if command.process.returncode is None:
            command.process.terminate()  # the launcher stops its ranks
            command.process.wait()
    if first is None or not validations:
        raise SystemExit(f"the run recorded no step or no validation:\n{command.output.read_text()}")
    return Run(
        steps=steps,
        seconds_to_first_step=first,
        seconds_to_goal=next((seconds for _, seconds, bits in validations if bits < GOAL), None),
        final_bits_per_byte=validations[-1][2],
        seconds=timed.seconds,
        cpu_seconds=timed.cpu_seconds,
        bits_per_byte=validations,
    )


def print_table(report: dict[str, Any]) -> None:
    print(f"{'':32}{'seconds':>9}{'CPU s':>9}")
    for name, result in report["commands"].items():
        print(f"{name:32}{result['seconds']:9.2f}{result['cpu_seconds']:9.2f}")
    run = report["run"]
    goal = run["seconds_to_goal"]
    print(f"{'default run, first step':32}{run['seconds_to_first_step']:9.2f}")
    print(f"{f'  below {GOAL} bits per byte':32}{'never' if goal is None else f'{goal:.2f}':>9}")
    every = f"  all {run['steps']} steps"
    print(f"{every:32}{run['seconds']:9.2f}{run['cpu_seconds']:9.2f}")
    print(f"{'  final bits per byte':32}{run['final_bits_per_byte']:9.3f}")


def measure_job(quick: bool, rounds: int) -> dict[str, Any]:
    """The documented commands and the default training run, with what they were measured on."""
    report: dict[str, Any] = {
        "what": "the documented commands and the default training run, as a user meets them",
        "quick": quick,
        "commit": commit("../automoe", "starts.py"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "hydra-core")},
        "goal_bits_per_byte": GOAL,
        "rounds": rounds,
    }
    with tempfile.TemporaryDirectory(prefix="main_job_") as folder:
        tmp = Path(folder)
        commands: dict[str, Any] = {}
        for name, (arguments, _) in COMMANDS.items():
            taken = [asdict(time_command(name, tmp)) for _ in range(rounds)]
            commands[name] = {
                "command": f"python -m {' '.join(arguments)}".replace("{tmp}", "TMP"),
                "seconds": median(one["seconds"] for one in taken),
                "cpu_seconds": median(one["cpu_seconds"] for one in taken),
                "rounds": taken,
            }
        report["commands"] = commands
        report["run"] = asdict(time_run(tmp, QUICK if quick else ()))
    return report


@contextmanager
def checkout(revision: str) -> Iterator[tuple[str, Path]]:
    """The whole hash of a commit, and a folder with its files, for a while."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    whole = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory() as folder:
        git("worktree", "add", "--detach", f"{folder}/files", whole)
        try:
            yield whole, Path(folder, "files")
        finally:
            git("worktree", "remove", "--force", f"{folder}/files")


def timed(root: Path, arguments: tuple[str, ...], tmp: Path) -> dict[str, float]:
    """What a command from the files in ``root`` takes, ``automoe train`` unless named; it must end well."""
    with tempfile.TemporaryDirectory(dir=tmp) as folder:
        words = [word.format(larger=tmp / "larger") for word in arguments]
        if not words[0].startswith("automoe."):
            words = ["automoe.train", f"run_dir={folder}/run", *words]
        process = Command(tuple(words), tmp, root).ended()
    assert process is not None
    return asdict(process)


def measure(roots: dict[str, Path], cases: list[str], rounds: int) -> dict[str, Any]:
    """Of every case and checkout the rounds and their medians, taken in turns after one round that does not count."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        if {"HF load", "checkpoint load"} & set(cases):
            timed(HERE.parent, (*FEW, *LARGER, "checkpoint.export_hf=true", "run_dir={larger}"), tmp)
        for case in cases:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
            for number in range(rounds + 1):
                for name, root in roots.items():
                    one = timed(root, CASES[case], tmp)
                    found[name] += [one] if number else []
            results[case] = {
                name: {key: median(one[key] for one in ran) for key in ran[0]} | {"rounds": ran}
                for name, ran in found.items()
            }
            shown = "  ".join(
                f"{name} {r['cpu_seconds']:.2f} ({r['seconds']:.2f})" for name, r in results[case].items()
            )
            print(f"{case}: CPU-seconds (seconds) {shown}", flush=True)
    if {"one step", "41 steps"} <= results.keys():
        results["41 steps"]["cpu_seconds_per_step"] = {
            name: (results["41 steps"][name]["cpu_seconds"] - results["one step"][name]["cpu_seconds"]) / 40
            for name in roots
        }
    return results


def measure_starts(before: str | None, cases: list[str], rounds: int) -> dict[str, Any]:
    """The short runs of this checkout, in turns with those of the commit ``before`` if one is named."""
    report: dict[str, Any] = {"what": __doc__.splitlines()[0], "commit": commit(), "cpu": cpu_model()}
    report |= {"cores": os.cpu_count(), "load_average_before": os.getloadavg(), "rounds": rounds}
    with ExitStack() as stack:
        roots = {"now": HERE.parent}
        if before:
            report["before"], roots["before"] = stack.enter_context(checkout(before))
        report["results"] = measure(roots, cases, rounds)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="a commit of this repository to take turns with")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--job", action="store_true", help="the documented commands and the default run instead")
    parser.add_argument("--quick", action="store_true", help="with --job: a small run, each command once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    if args.job:
        report = measure_job(args.quick, 1 if args.quick else args.rounds)
        print_table(report)
    else:
        report = measure_starts(args.before, args.case or list(CASES), args.rounds)
    name = "main_job" if args.job else "starts"
    out = args.out or HERE / "results" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
