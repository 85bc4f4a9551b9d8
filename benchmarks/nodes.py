"""Several nodes on one machine: network namespaces with a link each, under torchrun and under Slurm's variables.

Every node has an address of its own and reaches the others through a bridge alone, as machines do through a switch; they
share the disk. Held against the same run on one machine: the losses of every step, over a link that is slow, and over one
that is cut in the middle and comes back. Needs root and iproute2 (``ip``, ``tc``).

    python benchmarks/nodes.py                  # writes benchmarks/results/nodes.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from provenance import commit, cpu_model

HERE = Path(__file__).resolve().parent
RANKS, STEPS, PORT = 4, 8, 29611
RATE = "10mbit"  # of what leaves the slow node
CUT_AFTER = 3  # steps
LIMIT_S = 30  # launch.timeout_s: how long ranks wait for a node that is gone
OVERRIDES = [
    "train.dtype=float64",
    "moe.experts=loop",
    f"train.steps={STEPS}",
    "train.seq_len=64",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "train.val_every=0",
    "data.max_bytes=200000",
    "checkpoint.every=2",
    "checkpoint.export_hf=false",
    "observe.report=false",
    f"launch.timeout_s={LIMIT_S}",
    f"launch.init_timeout_s={4 * LIMIT_S}",
]


NETWORKS = itertools.count()


def sh(*words: object) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(word) for word in words], check=True)


@contextlib.contextmanager
def network(num_nodes: int) -> Iterator[list[str]]:
    """Names of namespaces, each with one link to a bridge and the address 10.77.0.N."""
    bridge = f"amo{os.getpid() % 10000}x{next(NETWORKS)}"  # links of the one before may live for a moment
    nodes = [f"{bridge}n{i}" for i in range(num_nodes)]
    sh("ip", "link", "add", bridge, "type", "bridge")
    try:
        sh("ip", "link", "set", bridge, "up")
        for i, node in enumerate(nodes):
            sh("ip", "netns", "add", node)
            sh("ip", "link", "add", node, "type", "veth", "peer", "name", "net0", "netns", node)
            sh("ip", "link", "set", node, "master", bridge, "up")
            sh("ip", "-n", node, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "net0")
            sh("ip", "-n", node, "link", "set", "net0", "up")
            sh("ip", "-n", node, "link", "set", "lo", "up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def start(nodes: list[str], launcher: str, run_dir: Path, log: Path) -> list[subprocess.Popen[bytes]]:
    """The processes of one job: an agent a node with torchrun, a task a rank with Slurm's variables."""
    job = ["-m", "automoe.train", f"run_dir={run_dir}", *OVERRIDES]
    here = RANKS // len(nodes)
    started = []
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TORCHELASTIC_"))}
    plain |= {"GLOO_SOCKET_IFNAME": "net0", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    for i, node in enumerate(nodes):
        inside = ["ip", "netns", "exec", node]
        if launcher == "torchrun":
            words = f"--nnodes={len(nodes)} --nproc-per-node={here} --node-rank={i} --master-addr=10.77.0.1"
            agent = [sys.executable, "-m", "torch.distributed.run", *words.split(), f"--master-port={PORT}"]
            commands = [([*inside, *agent, *job], plain)]
        else:
            commands = []
            for local in range(here):
                task = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": str(RANKS)}
                task |= {"SLURM_PROCID": str(i * here + local), "SLURM_LOCALID": str(local)}
                task |= {"SLURM_STEP_TASKS_PER_NODE": f"{here}(x{len(nodes)})", "SLURM_STEP_NODELIST": "10.77.0.1"}
                commands.append(([*inside, sys.executable, *job], plain | task))
        for number, (command, env) in enumerate(commands):
            with log.with_name(f"{log.name}-{i}-{number}.log").open("ab") as out:
                started.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    return started


def finish(started: list[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Exit statuses; None of one that had to be killed."""
    end = time.monotonic() + seconds
    statuses: list[int | None] = []
    for process in started:
        try:
            statuses.append(process.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            statuses.append(None)
    return statuses


def losses(run_dir: Path) -> list[float]:
    """Of every step in order, from the record."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def difference(one: list[float], other: list[float]) -> float:
    """The largest relative difference; infinite where steps are missing."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def one_machine(run_dir: Path) -> dict[str, Any]:
    begun = time.monotonic()
    command = [sys.executable, "-m", "automoe.train", f"run_dir={run_dir}", *OVERRIDES]
    sh(*command)
    return {"losses": losses(run_dir), "seconds": time.monotonic() - begun}


def case(folder: Path, launcher: str, num_nodes: int, expected: list[float], slow: bool = False) -> dict[str, Any]:
    """A run to its end over a network of so many nodes."""
    name = f"{launcher}-{num_nodes}{'-slow' if slow else ''}"
    with network(num_nodes) as nodes:
        if slow:
            sh(
                "tc",
                "-n",
                nodes[-1],
                "qdisc",
                "add",
                "dev",
                "net0",
                "root",
                *f"tbf rate {RATE} burst 64kbit latency 500ms".split(),
            )
        begun = time.monotonic()
        statuses = finish(start(nodes, launcher, folder / name, folder / name), 300)
    found = {"launcher": launcher, "nodes": num_nodes, "rate": RATE if slow else "unlimited", "statuses": statuses}
    found |= {"seconds": time.monotonic() - begun, "difference": difference(losses(folder / name), expected)}
    return found


def cut(folder: Path, launcher: str, expected: list[float]) -> dict[str, Any]:
    """A link that is cut after some steps: every process ends by itself, and the same command goes on."""
    name = f"{launcher}-cut"
    run_dir, log = folder / name, folder / name
    with network(2) as nodes:
        # So slow that the run is still in the middle when the link goes.
        sh(
            "tc",
            "-n",
            nodes[-1],
            "qdisc",
            "add",
            "dev",
            "net0",
            "root",
            *f"tbf rate {RATE} burst 64kbit latency 500ms".split(),
        )
        started = start(nodes, launcher, run_dir, log)
        begun = time.monotonic()
        while len(losses(run_dir)) < CUT_AFTER and time.monotonic() - begun < 200:
            time.sleep(0.05)
        done = len(losses(run_dir))
        sh("ip", "link", "set", nodes[-1], "down")
        begun = time.monotonic()
        statuses = finish(started, 6 * LIMIT_S)
        ended = time.monotonic() - begun
        said = [found for path in sorted(folder.glob(f"{name}-*.log")) for found in errors(path)]
        sh("ip", "link", "set", nodes[-1], "up")
        again = finish(start(nodes, launcher, run_dir, folder / f"{name}-again"), 300)
    return {
        "launcher": launcher,
        "cut_after_step": done,
        "statuses": statuses,
        "seconds_until_all_had_ended": ended,
        "said": said,
        "statuses_of_the_next_start": again,
        "difference": difference(losses(run_dir), expected),
    }


def errors(path: Path) -> list[str]:
    """Lines of a log that say what was wrong."""
    return [line.strip() for line in path.read_text(errors="replace").splitlines() if re.match(r"\s*error: ", line)]


def main() -> int:
    """Run all cases; 1 if one of them is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "nodes.json")
    parser.add_argument("--keep", action="store_true", help="leave the runs and logs where they are")
    args = parser.parse_args()
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        print("error: network namespaces need root and iproute2 (ip, tc)", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="nodes-"))
    alone = one_machine(folder / "alone")
    expected = alone["losses"]
    cases = [
        case(folder, "torchrun", 2, expected),
        case(folder, "torchrun", 4, expected),
        case(folder, "srun", 2, expected),
        case(folder, "torchrun", 2, expected, slow=True),
    ]
    cuts = [cut(folder, launcher, expected) for launcher in ("torchrun", "srun")]
    right = all(one["difference"] <= 1e-10 and not any(one["statuses"]) for one in cases)
    right &= all(one["difference"] <= 1e-10 and not any(one["statuses_of_the_next_start"]) for one in cuts)
    right &= all(None not in one["statuses"] and all(one["statuses"]) for one in cuts)
    result = {
        "commit": commit(),
        "torch": version("torch"),
        "cpu": cpu_model(),
        "ranks": RANKS,
        "steps": STEPS,
        "one_machine": alone,
        "networks": cases,
        "cuts": cuts,
        "right": right,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(f"runs and logs: {folder}" if args.keep else "")
    if not args.keep:
        shutil.rmtree(folder)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
