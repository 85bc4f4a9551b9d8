"""Run a benchmark by its name, or the short forms of all that need no GPU.

    python benchmarks/run.py                      # the questions that are still asked, a line each
    python benchmarks/run.py cpu_step --rounds 3  # one benchmark, with its own arguments
    python benchmarks/run.py --short              # short forms, ten minutes; the table of docs/performance.md
    python benchmarks/run.py --short hf_load      # this short form alone; the others' rows stay
    python benchmarks/run.py --table              # the table again, from the JSON

Short forms are of small models and one round: they show that a benchmark runs and about where it stands. The step is
measured at full size, of one model in two rounds. Numbers to rely on are those of ``benchmarks/results``.
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

from measuring import HERE, commit, cpu_model

RESULT, PAGE = HERE / "results" / "short.json", HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- short: written by benchmarks/run.py -->\n", "<!-- end of short -->\n"
Rows = Iterator[tuple[str, str]]  # what is measured, and the number


def step_rows(report: dict[str, Any]) -> Rows:
    for shape, model in report["models"].items():
        best, tokens = model["best_other"], model["results"]["automoe"]["tokens_per_cpu_second"]
        yield f"training step, {shape} model, the recipe", f"{tokens:.0f} tokens a CPU-second"
        yield f"the same over the best other, {best}", f"{model['ours_over_best_other']:.2f}"
        yield "the bare decoder over it", f"{model['decoder_over_best_other']:.2f}"
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


def start_rows(report: dict[str, Any]) -> Rows:
    for case, found in report["results"].items():
        yield f"three steps of a small model, {case}", f"{found['now']['cpu_seconds']:.1f} CPU-seconds"


# Script, its arguments, and the rows of what it writes.
SHORT: dict[str, tuple[list[str], Callable[[dict[str, Any]], Rows]]] = {
    "cpu_step": (["--shape", "mla", "--rounds", "2"], step_rows),
    "sft_step": (["--quick"], sft_rows),
    "checkpoint": (["--quick"], checkpoint_rows),
    "hf_load": (["--quick"], load_rows),
    "starts": (["--rounds", "1", "--case", "one rank", "--case", "two ranks"], start_rows),
}
QUESTIONS = {
    "cpu_step": "Is a training step on one CPU thread faster than that of transformers and NeMo Automodel?",
    "sft_step": "Does fine-tuning have the losses of TRL's SFTTrainer, and how fast is it beside it?",
    "peer_steps": "How fast and large is a step beside peft, transformers' Trainer, and its own FSDP2 and expert parallelism?",
    "grpo_step": "Is a step of reinforcement learning equal to that of TRL's GRPOTrainer, and how fast and large beside it?",
    "checkpoint": "What do saving and loading cost beside a raw write and plain torch.distributed.checkpoint?",
    "hf_load": "How many bytes, how much memory and time does loading a HuggingFace checkpoint take?",
    "install": "What do the first commands of a new user take and download, with PyPI alone? (a path of Python)",
    "starts": "What does a user wait for: a short run, the documented commands, the default run?",
    "plan_correlation": "Are CPU-seconds of a step on 18 meshes as a calibrated plan predicts?",
    "fit_time": "How far are predicted step times from published runs? (--fit writes the constants)",
    "trajectories": "Does a commit train to the same bits as the one before it?",
    "class_tier": "Which MoE classes of transformers train here, and how far are they from transformers' own numbers?",
    "convergence": "Does a model learn the same on two meshes, and under transformers' Trainer, and how with Muon, FP8, MTP?",
    "soak": "Is anything lost when runs are killed at random moments?",
    "moe_kernel": "How fast is one MoE layer on one GPU, beside every other implementation?",
    "gpu_parts": "How long do norms and sums of weight gradients take on this GPU, beside torch's kernels?",
    "tune_kernels": "Which blocks are fastest for each product of the Triton experts on this GPU?",
    "train_step": "How fast are whole steps on one GPU, beside transformers and torchtitan?",
}
# Results of questions that are no longer asked: NOTES.md has a paragraph on each, and the commit in the file has its script.
CLOSED = ("checkpoint_plan", "hf_sharing", "many_ranks", "moe_layer", "nodes", "plan_speed", "tokenise")


def run_short(name: str, folder: Path) -> dict[str, Any]:
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
    return "\n".join(lines)


def page(report: dict[str, Any]) -> str:
    """``docs/performance.md`` with the table of ``report``."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table(report) + END + rest.split(END)[1]


def run_shorts(names: list[str]) -> None:
    """Measure ``names``, keep the other rows of the stored result, and write the table."""
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with tempfile.TemporaryDirectory(prefix="automoe-bench-") as folder:
        for name in names:
            report[name] = run_short(name, Path(folder))
            RESULT.write_text(json.dumps({key: report[key] for key in SHORT if key in report}, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULT.read_text())))


def main() -> int:
    """Return the exit status of the benchmark."""
    if sys.argv[1:2] and sys.argv[1] in QUESTIONS:
        name, *arguments = sys.argv[1:]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE.parent), os.getenv("PYTHONPATH"))))
        }
        return subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments], env=environment).returncode
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", nargs="*", metavar="NAME", help=f"these of {', '.join(SHORT)}; default: all")
    parser.add_argument("--table", action="store_true", help="write the table from the JSON, measure nothing")
    args = parser.parse_args()
    if unknown := sorted(set(args.short or ()) - set(SHORT)):
        parser.error(f"no short form of {', '.join(unknown)}; there are {', '.join(SHORT)}")
    if args.table or args.short is not None:
        run_shorts([] if args.table else args.short or list(SHORT))
        return 0
    for name, question in QUESTIONS.items():
        print(f"{name:18}{question}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
