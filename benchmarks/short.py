"""The short form of the CPU benchmarks, one after the other, and the table of ``docs/performance.md`` made from them.

Most short forms are of small models and one round: they show that a benchmark runs and about where it stands. The step
is measured at full size, of one model in two rounds. Numbers to rely on are those of ``benchmarks/results``, with
``benchmarks/NOTES.md``.

    python benchmarks/short.py            # eleven minutes; writes benchmarks/results/short.json and the table
    python benchmarks/short.py hf_load    # that one alone; the others' rows stay
    python benchmarks/short.py --table    # the table again, from the JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from provenance import commit, cpu_model

HERE = Path(__file__).resolve().parent
RESULT, PAGE = HERE / "results" / "short.json", HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- short: written by benchmarks/short.py -->\n", "<!-- end of short -->\n"
Rows = Iterator[tuple[str, str]]  # what is measured, and the number


def step_rows(report: dict[str, Any]) -> Rows:
    for shape, model in report["models"].items():
        best, tokens = model["best_other"], model["results"]["automoe"]["tokens_per_cpu_second"]
        yield f"training step, {shape} model, the recipe", f"{tokens:.0f} tokens a CPU-second"
        yield f"the same over the best other, {best}", f"{model['ours_over_best_other']:.2f}"
        yield "the bare decoder over the same other", f"{model['decoder_over_best_other']:.2f}"
        for name, reason in model["absent"].items():
            yield f"{name} is absent", reason


def sft_rows(report: dict[str, Any]) -> Rows:
    yield "fine-tuning step of a small model over TRL's SFTTrainer", f"{report['step']['ours_over_trl']:.2f}"


def checkpoint_rows(report: dict[str, Any]) -> Rows:
    seconds = report["results"]["cpu_seconds"]
    yield (
        "saving 18 MB, CPU-seconds over those of plain torch.distributed.checkpoint",
        f"{seconds['save'] / seconds['plain_save']:.2f}",
    )
    yield "loading it, likewise", f"{seconds['load'] / seconds['plain_load']:.2f}"


def plan_rows(report: dict[str, Any]) -> Rows:
    yield "bytes to rank 0 for the plan of a second save", f"{report['second_save_cached']['bytes_to_rank_0']:,}"


def load_rows(report: dict[str, Any]) -> Rows:
    for kind in ("bfloat16", "fp8"):
        ours, theirs = (
            report["results"][f"{kind}/ep4/{name}"]["cpu_seconds_all_ranks"] for name in ("automoe", "torch")
        )
        yield (
            f"loading a small {kind} checkpoint on four ranks over torch's reader, CPU-seconds",
            f"{ours / theirs:.2f}",
        )
    yield (
        "index of 90,427 tensors, slowest of four ranks",
        f"{report['index']['cpu_seconds_worst_rank']:.2f} CPU-seconds",
    )


def tokenise_rows(report: dict[str, Any]) -> Rows:
    yield "tokenising, byte-level BPE", f"{report['mb_per_cpu_second']:.1f} MB a CPU-second"


def rank_rows(report: dict[str, Any]) -> Rows:
    for name, mesh in report["meshes"].items():
        if name != "one":
            yield f"ranks of {name} together over one rank, CPU-seconds of a step", f"{mesh['over_one_rank']:.2f}"


def start_rows(report: dict[str, Any]) -> Rows:
    for case, found in report["results"].items():
        yield f"three steps of a small model, {case}", f"{found['now']['cpu_seconds']:.1f} CPU-seconds"


# Script, its arguments, and the rows of what it writes.
SHORT: dict[str, tuple[list[str], Callable[[dict[str, Any]], Rows]]] = {
    "cpu_step": (["--shape", "mla", "--rounds", "2"], step_rows),
    "sft_step": (["--quick"], sft_rows),
    "checkpoint": (["--quick"], checkpoint_rows),
    "checkpoint_plan": (["--quick"], plan_rows),
    "hf_load": (["--quick"], load_rows),
    "tokenise": (["--mb", "20"], tokenise_rows),
    "local_ranks": (["--rounds", "1"], rank_rows),
    "starts": (["--rounds", "1"], start_rows),
}
LONG_ONLY = ("main_job", "many_ranks", "moe_layer", "nodes", "plan_correlation", "plan_speed", "soak", "trajectories")


def run(name: str, folder: Path) -> dict[str, Any]:
    """One short form; its own text goes to the terminal. A script that fails ends the whole."""
    arguments, rows_of = SHORT[name]
    out, start = folder / f"{name}.json", time.perf_counter()
    facts = {
        "commit": commit("../automoe", "*.py"),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
        "load_average": os.getloadavg()[0],
        "arguments": arguments,
    }
    subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments, "--out", str(out)], check=True)
    rows = list(rows_of(json.loads(out.read_text())))
    return facts | {"seconds": round(time.perf_counter() - start), "rows": rows}


def table(report: dict[str, Any]) -> str:
    """What stands between the markers."""
    lines = []
    for name, one in report.items():
        lines.append(
            f"`{name}.py {' '.join(one['arguments'])}` on {one['date']} at `{one['commit'][:10]}`, "
            f"{one['cores']} cores of {one['cpu']}, torch {one['torch']}, load {one['load_average']:.1f}, "
            f"{one['seconds']} s:\n\n| | |\n|---|---|"
        )
        lines += [f"| {what} | {number} |" for what, number in one["rows"]]
        lines.append("")
    if missing := [f"`{name}`" for name in SHORT if name not in report]:
        lines.append(f"Not measured yet: {', '.join(missing)}.\n")
    return "\n".join([*lines, f"Without a short form: {', '.join(f'`{name}`' for name in LONG_ONLY)}.\n"])


def page(report: dict[str, Any]) -> str:
    """``docs/performance.md`` with the table of ``report``."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table(report) + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"only these of {', '.join(SHORT)}")
    parser.add_argument("--table", action="store_true", help="write the table from the JSON, measure nothing")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(SHORT)):
        parser.error(f"no short form of {', '.join(unknown)}; there are {', '.join(SHORT)}")
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with tempfile.TemporaryDirectory(prefix="automoe-bench-") as folder:
        for name in [] if args.table else args.names or SHORT:
            report[name] = run(name, Path(folder))
            RESULT.write_text(json.dumps({key: report[key] for key in SHORT if key in report}, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
