"""What a short run costs from the command to its end: almost all of it is the start, and the report at the end.

Three steps of a small model on one, two and four gloo ranks, and a sweep of four jobs, on this checkout in turns with
another commit of it. CPU-seconds are those of the process and all that it started. Token caches are warm.

    python benchmarks/starts.py --before HASH      # five minutes; writes benchmarks/results/starts.json
    python benchmarks/starts.py --rounds 1         # this checkout alone, once
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from main_job import Command
from provenance import commit, cpu_model

HERE = Path(__file__).resolve().parent
RUN = ("experiment=smoke", "mesh=fsdp", "train.global_batch_size=8", "launch.device=cpu")
CASES = {
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
    """Seconds and CPU-seconds of ``automoe train`` from the files in ``root``; the run must end well."""
    with tempfile.TemporaryDirectory(dir=tmp) as folder:
        one = Command(("automoe.train", *arguments, f"run_dir={folder}/run"), tmp, root).ended()
    assert one is not None
    return asdict(one)


def measure(roots: dict[str, Path], cases: list[str], rounds: int) -> dict[str, Any]:
    """Of every case and checkout the rounds and their medians, taken in turns after one round that does not count."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
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
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="a commit of this repository to take turns with")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "starts.json", help="where the JSON goes")
    args = parser.parse_args()
    report: dict[str, Any] = {"what": __doc__.splitlines()[0], "commit": commit(), "cpu": cpu_model()}
    report |= {"cores": os.cpu_count(), "load_average_before": os.getloadavg(), "rounds": args.rounds}
    with ExitStack() as stack:
        roots = {"now": HERE.parent}
        if args.before:
            report["before"], roots["before"] = stack.enter_context(checkout(args.before))
        report["results"] = measure(roots, args.case or list(CASES), args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
