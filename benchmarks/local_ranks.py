"""What the CPU-seconds of a step grow by when ranks of one machine share it, and where they go.

A mesh's step is timed with its ranks, and without the others: each rank alone in a fake process group, which answers at
once and moves nothing, so what is left is its own products and the rest of its Python. The difference is communication.
One rank, which cuts nothing, is the floor:

    step = one rank's step + (ranks alone - one rank's step) + (step - ranks alone)
                             smaller products, work repeated    communication

Steps whose gathers and sums are torch's own take turns with those that send them through all-to-alls.

    python benchmarks/local_ranks.py     # five minutes; writes benchmarks/results/local_ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from provenance import commit, cpu_model

from automoe.config.compose import compose_config
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.parallel import collectives
from automoe.parallel.collectives import GlooReduceScatter, ProcessGroupDispatch
from automoe.parallel.fake_world import fake_world
from automoe.verify.pool import RankPool, leave_world
from tests.support.memory import build_trainer, random_batch, take_step

RESULT = Path(__file__).resolve().parent / "results" / "local_ranks.json"
ROUNDS, STEPS = 5, 3
COMMON = ["moe.gate=balanced", "train.seq_len=256", "train.global_batch_size=8", "train.micro_batch_size=2"]
COMMON += ["launch.num_ranks=null", *(f"mesh.{axis}=1" for axis in ("pp", "ep", "dp_shard"))]
CASES = {
    "one": "",
    "dp2": "mesh.dp_shard=2",
    "dp4": "mesh.dp_shard=4",
    "dp2 ep2": "mesh.dp_shard=2 mesh.ep=2",
    "dp4 ep4": "mesh.dp_shard=4 mesh.ep=4",
    "tp2": "mesh.tp=2",
    "tp4": "mesh.tp=4",
    "cp2": "mesh.cp=2",
    "cp4": "mesh.cp=4",
    "pp2": "mesh.pp=2",
    "pp4": "mesh.pp=4",
}


def config_of(name: str) -> Config:
    return compose_config(overrides=list({one.split("=")[0]: one for one in (*COMMON, *CASES[name].split())}.values()))


def gloo_seconds() -> float:
    """CPU-seconds of this process' threads that gloo started."""
    found = 0.0
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            found += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def measure(names: list[str], ways: tuple[bool, ...] = (True,)) -> dict[tuple[str, bool], list[tuple[float, ...]]]:
    """This rank's CPU-seconds of each timed step of each mesh, which take turns: all, in the kernel, gloo's threads'.

    Args:
        ways: whether gathers and sums are all-to-alls, or torch's own.
    """
    trainers = {name: build_trainer(config_of(name)) for name in names}
    seconds = {(name, way): list[tuple[float, ...]]() for name in names for way in ways}
    for step in range(1 + STEPS):
        for name, way in seconds:
            trainer = trainers[name]
            batch = random_batch(trainer.config, step, trainer.meshes.dp_rank, trainer.meshes.shape.dp)
            if dist.get_world_size() > 1:
                dist.barrier()
            with ExitStack() as stack:
                if not way:
                    stack.enter_context(mock.patch.object(collectives, "over_gloo", lambda group: False))
                    stack.enter_context(mock.patch.object(GlooReduceScatter, "__call__", torchs_reduce_scatter))
                before = time.process_time(), os.times().system, gloo_seconds()
                take_step(trainer, batch)
                after = time.process_time(), os.times().system, gloo_seconds()
            if step:  # the first has no moments, and opens groups
                seconds[name, way].append(tuple(two - one for one, two in zip(before, after, strict=True)))
    return seconds


def torchs_reduce_scatter(
    _: GlooReduceScatter,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType,
) -> None:
    """What FSDP does by itself."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output_tensor, input_tensor, op, group)


def alone(name: str, rank: int) -> list[float]:
    """CPU-seconds of ``rank``'s steps in a world without the others."""
    config = config_of(name)
    with ExitStack() as stack:
        stack.enter_context(fake_world(rank, validate(config, None).world_size))
        # Of what others would have answered: as many rows as they get, and (torch's stages) that all metadata is known.
        even = mock.patch.object(ProcessGroupDispatch, "exchange_counts", lambda self, counts: counts.clone())
        stack.enter_context(even)
        stack.enter_context(mock.patch.object(dist, "recv", lambda tensor, *args, **kwargs: tensor.fill_(1)))
        found = measure([name])[name, True]
    leave_world([])  # caches that know groups by their names
    return [total for total, *_ in found]


def account(steps: dict[tuple[str, bool], list[list[float]]], apart: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over rounds, in CPU-seconds of all ranks together, and as parts of one rank's step."""
    whole, kernel, threads = ({key: median(one[i] for one in steps[key]) for key in steps} for i in range(3))
    floor, found = whole["one", True], {}
    for name in CASES:
        seconds = whole[name, True]
        without = median(apart[name]) if apart[name] else floor
        found[name] = {
            "overrides": CASES[name],
            "cpu_seconds": round(seconds, 4),
            "with_torchs_collectives": round(whole[name, False], 4),
            "over_one_rank": round(seconds / floor, 3),
            "of_it_smaller_products": round((without - floor) / floor, 3),
            "of_it_communication": round((seconds - without) / floor, 3),
            "kernel_seconds": round(kernel[name, True], 4),
            "gloo_thread_seconds": round(threads[name, True], 4),
            "rounds": [round(one[0], 4) for one in steps[name, True]],
            "rounds_with_torchs_collectives": [round(one[0], 4) for one in steps[name, False]],
            "alone_rounds": [round(one, 4) for one in apart[name]],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {name: validate(config_of(name), None).world_size for name in CASES}
    pool = RankPool(max_ranks=max(sizes.values()))
    steps = {(name, way): list[list[float]]() for name in CASES for way in (True, False)}
    apart = {name: list[float]() for name in CASES}
    for turn in range(args.rounds):
        for world in sorted(set(sizes.values())):
            names = [name for name in CASES if sizes[name] == world]
            ranks = pool.run(measure, world, names, (True, False))
            for key in ranks[0]:
                steps[key].append([sum(median(step[i] for step in rank[key]) for rank in ranks) for i in range(3)])
            for name in names if world > 1 else ():
                apart[name].append(sum(median(alone(name, rank)) for rank in range(world)))
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    pool.close()
    result = {"commit": commit(), "cpu": cpu_model(), "cores": os.cpu_count(), "torch": version("torch")}
    result |= {"one_rank_seconds": median(one[0] for one in steps["one", True]), "meshes": account(steps, apart)}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, one in result["meshes"].items():
        print(name.ljust(8), *(f"{key} {value}" for key, value in list(one.items())[1:8]))


if __name__ == "__main__":
    main()
