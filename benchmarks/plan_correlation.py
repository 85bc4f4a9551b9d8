"""CPU-seconds of a step on many meshes, predicted from a calibrated cluster file beside measured.

A step is what a recipe does: inputs, forward, backward, norm, update. Its CPU-seconds are those of all processes of the
mesh, all their threads, so ranks that share cores or wait for others do not count twice. Meshes of one world take turns,
step by step; worlds take turns, round by round. The machine is calibrated first, by ``automoe plan calibrate=true``.

    python benchmarks/plan_correlation.py          # ten minutes; writes benchmarks/results/plan_correlation.json and .svg
    python benchmarks/plan_correlation.py --draw   # the picture again, from the JSON
    python benchmarks/plan_correlation.py --schedules  # minutes; writes benchmarks/results/pipeline_schedules.json
    python benchmarks/plan_correlation.py --ranks  # five minutes; writes benchmarks/results/local_ranks.json

With ``--schedules`` stages sleep in place of computing, over gloo: the seconds of a step that the plan simulates for these
times beside those that the trainer's pipeline runtime takes.

With ``--ranks`` a mesh's step is also timed rank by rank in a world where nobody else answers and nothing moves: what that
takes above one rank's step is smaller products and repeated work, and what ranks take beyond it is communication.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import measuring  # noqa: F401  (puts the checkout on the path)
import numpy as np
import torch
from measuring import commit, cpu_model

from automoe.config.compose import compose_config
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.planner.schedule import StageTimes, simulate
from automoe.planner.time import step_time
from automoe.verify.pool import RankPool

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "plan_correlation.json"
ROUNDS, STEPS = 5, 3  # worlds built; timed steps of a mesh in each
TICKS = (0.4, 0.6, 1, 1.5, 2, 3, 4, 6)
COMMON = ["moe.gate=balanced", "train.seq_len=256", "train.global_batch_size=8", "train.micro_batch_size=2"]
COMMON += ["launch.num_ranks=null", *(f"mesh.{axis}=1" for axis in ("pp", "ep"))]
FREED = "parallel.reshard=micro_batch parallel.grad_sync=micro_batch"
TWICE = "parallel.schedule=Interleaved1F1B parallel.stages_per_rank=2"
SMALL = "train.micro_batch_size=1"
# The default model on meshes of 2, 4 and 8 ranks: every axis, pipelines, recomputation, micro-batches.
CASES: dict[str, str] = {
    "dp2": "mesh.dp_shard=2",
    "dp2 ep2": "mesh.dp_shard=2 mesh.ep=2",
    "dp2 ep2, recompute full": "mesh.dp_shard=2 mesh.ep=2 parallel.recompute=full",
    "tp2 ep2": "mesh.dp_shard=1 mesh.tp=2 mesh.ep=2",
    "cp2 ep2": "mesh.dp_shard=1 mesh.cp=2 mesh.ep=2",
    "pp2": "mesh.dp_shard=1 mesh.pp=2",
    "dp2, micro-batch 1, freed": f"mesh.dp_shard=2 {SMALL} {FREED}",
    "dp4 ep4": "mesh.dp_shard=4 mesh.ep=4",
    "dp4, recompute moe": "mesh.dp_shard=4 parallel.recompute=moe",
    "tp4 ep4": "mesh.dp_shard=1 mesh.tp=4 mesh.ep=4",
    "dp2 tp2 etp2 ep2": "mesh.dp_shard=2 mesh.tp=2 mesh.etp=2 mesh.ep=2",
    "cp4 ep4": "mesh.dp_shard=1 mesh.cp=4 mesh.ep=4",
    "pp2 ep2": "mesh.pp=2 mesh.dp_shard=2 mesh.ep=2",
    "pp2 dp2, interleaved": f"mesh.pp=2 mesh.dp_shard=2 {TWICE}",
    "dp8 ep8, micro-batch 1": f"mesh.dp_shard=8 mesh.ep=8 {SMALL}",
    "dp4 tp2 ep2": "mesh.dp_shard=4 mesh.tp=2 mesh.ep=2",
    "pp2 tp2 dp2 ep2": "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 mesh.ep=2",
    "pp4 dp2 ep2, micro-batch 1": f"mesh.pp=4 mesh.dp_shard=2 mesh.ep=2 {SMALL}",
}

# What cuts rows and matrices, and moves activations in every layer.
SHARED = {"one": "mesh.dp_shard=1"} | {
    f"{axis}{size}": f"mesh.dp_shard=1 mesh.{axis}={size}" for axis in ("tp", "cp") for size in (2, 4)
}


def config_of(name: str, *cluster: str) -> Config:
    """The configuration called ``name``; ``cluster``: a folder with cluster files, and the name of one."""
    last = {text.split("=")[0]: text for text in (*COMMON, *(CASES | SHARED)[name].split())}
    if not cluster:
        return compose_config(overrides=list(last.values()))
    return compose_config("config", [*last.values(), f"cluster={cluster[1]}"], cluster[0])


def measure(names: list[str]) -> dict[str, list[float]]:
    """This rank's CPU-seconds of each timed step of each mesh, which take turns."""
    import torch.distributed as dist

    from tests.support.memory import build_trainer, random_batch, take_step

    trainers = {name: build_trainer(config_of(name)) for name in names}
    seconds = defaultdict(list)
    for step in range(1 + STEPS):
        for name, trainer in trainers.items():
            batch = random_batch(trainer.config, step, trainer.meshes.dp_rank, trainer.meshes.shape.dp)
            dist.barrier()
            began = time.process_time()
            take_step(trainer, batch)
            if step:  # the first has no moments, and opens groups
                seconds[name].append(time.process_time() - began)
    return dict(seconds)


def measured(cases: dict[str, str] = CASES) -> dict[str, list[list[float]]]:
    """CPU-seconds of a step on all ranks together, by round."""
    worlds: dict[int, list[str]] = defaultdict(list)
    for name in cases:
        worlds[validate(config_of(name), None).world_size].append(name)
    pool, found = RankPool(max_ranks=max(worlds)), {name: list[list[float]]() for name in cases}
    for round_index in range(ROUNDS):
        for world, names in worlds.items():
            ranks = pool.run("plan_correlation:measure", world, names)  # by name: ranks have another main module
            for name in names:
                found[name].append([sum(steps) for steps in zip(*(rank[name] for rank in ranks), strict=True)])
        print(f"round {round_index + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    pool.close()
    return found


def share_ranks() -> dict[str, Any]:
    """CPU-seconds of a step on all ranks, as multiples of one rank's step, and what of it is communication."""
    from automoe.verify.fake_world import fake_world
    from automoe.verify.pool import leave_world

    rounds = {name: [median(steps) for steps in all_rounds] for name, all_rounds in measured(SHARED).items()}
    apart = dict.fromkeys(SHARED, 0.0)  # of a mesh's ranks, one after the other
    for name in SHARED:
        for rank in range(world := validate(config_of(name), None).world_size):
            with fake_world(rank, world):  # completes collectives at once
                apart[name] += median(measure([name])[name])
            leave_world([])  # caches know groups by their names
    one, meshes = median(rounds["one"]), dict[str, Any]()
    for name, seconds in rounds.items():
        alone = apart[name] / apart["one"] * one  # such a world has a price of its own
        meshes[name] = {
            "overrides": SHARED[name],
            "cpu_seconds": round(median(seconds), 4),
            "over_one_rank": round(median(seconds) / one, 3),
            "of_it_smaller_products": round(alone / one - 1, 3),
            "of_it_communication": round((median(seconds) - alone) / one, 3),
            "rounds": [round(middle, 4) for middle in seconds],
        }
        print(name, meshes[name], flush=True)
    return {"meshes": meshes}


def calibrated(folder: Path) -> str:
    """The text of this machine's cluster file, written into ``folder``."""
    command = [sys.executable, "-m", "automoe.plan", "calibrate=true", f"out={folder}"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)})
    return next((folder / "cluster").glob("*.yaml")).read_text()


def predicted(text: str) -> dict[str, float]:
    """CPU-seconds of a step by the time model, all ranks together, on the cluster that ``text`` describes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cluster").mkdir()
        (Path(folder) / "cluster" / "calibrated.yaml").write_text(text)
        configs = {name: config_of(name, folder, "calibrated") for name in CASES}
    return {name: step_time(one, validate(one, None)).busy for name, one in configs.items()}


def compare(measures: dict[str, list[list[float]]], predictions: dict[str, float]) -> dict[str, Any]:
    """Each mesh's median and noise, and rank correlations.

    A mesh's noise is 1.4826 MAD of its rounds' medians, over the root of their number. Two meshes differ where their
    medians are further apart than twice both noises; ``spearman`` counts the others as ties, in both orders.
    """
    rounds = {name: [median(steps) for steps in all_rounds] for name, all_rounds in measures.items()}
    middle = np.array([median(rounds[name]) for name in rounds])
    spread = [1.4826 * median(abs(one - median(seen)) for one in seen) / len(seen) ** 0.5 for seen in rounds.values()]
    noise, guess = np.array(spread), np.array([predictions[name] for name in rounds])
    differ = np.abs(middle[:, None] - middle) > 2 * np.hypot(noise[:, None], noise)

    def places(values: np.ndarray, apart: np.ndarray) -> np.ndarray:
        order: np.ndarray = np.where(apart, np.sign(values[:, None] - values), 0.0).sum(axis=1)
        return order

    def correlation(apart: np.ndarray) -> float:
        return float(np.corrcoef(places(middle, apart), places(guess, apart))[0, 1])

    right = np.sign(middle[:, None] - middle) == np.sign(guess[:, None] - guess)
    return {
        "spearman": round(correlation(differ), 3),
        "spearman_all_pairs": round(correlation(np.ones_like(differ)), 3),
        "pairs_that_differ": int(differ.sum()) // 2,
        "of_those_in_order": int((differ & right).sum()) // 2,
        "ratio_median": round(float(np.median(guess / middle)), 3),
        "meshes": {
            name: {
                "overrides": CASES[name],
                "cpu_seconds": round(float(middle[i]), 4),
                "noise": round(float(noise[i]), 4),
                "predicted": round(float(guess[i]), 4),
                "rounds": [round(one, 4) for one in rounds[name]],
            }
            for i, name in enumerate(rounds)
        },
    }


# Schedule, merged passes, stages per rank.
ORDERS = (
    ("Interleaved1F1B", False),
    ("Interleaved1F1B", True),
    ("InterleavedZeroBubble", False),
    ("LoopedBFS", False),
    ("ZBVZeroBubble", False),
    ("DualPipeV", False),
    ("DualPipeV", True),
)
SLEPT = (0.1, 0.1, 0.1)  # seconds of a forward pass, and of the gradients of input and weights


def compare_schedules() -> dict[str, Any]:
    """Seconds of a step of each schedule on 2 and 4 ranks, simulated and taken, with even and with uneven stages."""
    from tests.support.slow_stages import seconds_of_steps

    pool, found = RankPool(max_ranks=4), dict[str, Any]()
    for pp in (2, 4):
        count, num_stages = 3 * pp, 2 * pp
        even = [SLEPT] * num_stages
        uneven = [
            (0.6 * SLEPT[0], 1.3 * SLEPT[1], (0.5 + place / num_stages) * SLEPT[2]) for place in range(num_stages)
        ]
        for name, stages in (("even", even), ("uneven", uneven)):
            times = tuple(StageTimes(f, i + w, halves=(i, w)) for f, i, w in stages)
            for schedule, merged in ORDERS:
                simulated = simulate(schedule, times, pp, count, 0.0, merged)
                ranks = pool.run(seconds_of_steps, pp, schedule, pp, count, merged, stages, 2)
                # Other work on the cores only adds.
                taken = min(max(steps) for steps in zip(*ranks, strict=True))
                label = f"pp{pp}, {name} stages, {schedule}{', merged' if merged else ''}"
                found[label] = {
                    "simulated": round(simulated, 4),
                    "taken": round(taken, 4),
                    "difference": round(taken / simulated - 1, 4),
                }
                print(label, found[label], flush=True)
    pool.close()
    return {"slept_seconds": SLEPT, "largest": max(abs(one["difference"]) for one in found.values()), "runs": found}


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(8.5, 5))
    axes = figure.subplots()
    meshes = dict(sorted(result["meshes"].items(), key=lambda item: item[1]["cpu_seconds"]))
    ends = [one[key] for one in meshes.values() for key in ("cpu_seconds", "predicted")]
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    axes.plot([low, high], [low, high], color="#b7bec8", linewidth=1)
    for number, one in enumerate(meshes.values(), start=1):
        at = one["cpu_seconds"], one["predicted"]
        axes.errorbar(*at, xerr=2 * one["noise"], fmt="o", color="#2a6fb0", markersize=4)
        # Names would lie over one another: numbers, on the far side of what is measured most often.
        side, way = (-5, "bottom") if at[1] > result["ratio_median"] * at[0] else (5, "top")
        axes.annotate(str(number), at, (side, -side), textcoords="offset points", fontsize=8, ha="center", va=way)
    axes.set(xscale="log", yscale="log", xlabel="CPU-seconds of a step, measured", ylabel="predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(TICKS))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    names = "\n".join(f"{number:2}  {name}" for number, name in enumerate(meshes, start=1))
    axes.text(1.03, 1, names, transform=axes.transAxes, fontsize=8, va="top", linespacing=1.5)
    axes.set_title(f"{len(meshes)} meshes of the default model: Spearman {result['spearman']:.2f}", fontsize=10)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    parser.add_argument("--schedules", action="store_true", help="simulated orders beside the runtime's")
    parser.add_argument("--ranks", action="store_true", help="ranks that share rows and matrices beside one rank")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    facts = {"commit": commit(), "cpu": cpu_model(), "cores": os.cpu_count(), "torch": version("torch")}
    for asked, name, ask in (
        (args.schedules, "pipeline_schedules.json", compare_schedules),
        (args.ranks, "local_ranks.json", share_ranks),
    ):
        if asked:
            torch.set_num_threads(1)
            out = RESULT.with_name(name) if args.out == RESULT else args.out
            out.write_text(json.dumps(facts | ask(), indent=1) + "\n")
            return
    if not args.draw:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            cluster = calibrated(Path(folder))
        result = facts | {"cluster": cluster} | compare(measured(), predicted(cluster))
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(args.out.read_text())
    draw(result, args.out.with_suffix(".svg"))
    print({key: value for key, value in result.items() if key not in ("cluster", "meshes")})


if __name__ == "__main__":
    main()
