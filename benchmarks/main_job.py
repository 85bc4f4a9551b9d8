"""What a user waits for: the documented commands in processes of their own, and the default training run.

Seconds are from the start of a process to its end, or to the line in ``metrics.jsonl``; CPU seconds are those of
the process and all that it started. The run begins with an empty token cache, as a user's first one does.

    python benchmarks/main_job.py             # minutes, on a machine at rest; writes benchmarks/results/main_job.json
    python benchmarks/main_job.py --quick     # a small run of a few steps, to check the script itself
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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from provenance import commit, cpu_model

HERE = Path(__file__).resolve().parent
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


@dataclass
class Timed:
    """One process: wall seconds, and CPU seconds of it and of every child that it waited for."""

    seconds: float
    cpu_seconds: float


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
        timed = Timed(self.seconds(), usage.ru_utime + usage.ru_stime)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a small run, each command once: checks the script, not speed"
    )
    parser.add_argument("--rounds", type=int, default=5, help="times that each command runs (default 5)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "main_job.json", help="where the JSON goes")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    report: dict[str, Any] = {
        "what": "the documented commands and the default training run, as a user meets them",
        "quick": args.quick,
        "commit": commit("../automoe", "main_job.py"),
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
        report["run"] = asdict(time_run(tmp, QUICK if args.quick else ()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
