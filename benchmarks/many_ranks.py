"""What grows with the number of ranks over gloo: joining, opening a group, agreeing, and the exchanges of a step.

Ranks are processes of this machine, far more than it has cores, so seconds by the clock grow with the work of all of them:
what grows with a rank's own share is in ``cpu_ms``, of the median rank. Medians of some rounds.

    python benchmarks/many_ranks.py          # writes benchmarks/results/many_ranks.json and .png
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from provenance import commit, cpu_model

from automoe.parallel.agreement import Ranks
from automoe.parallel.groups import open_groups
from automoe.training.stats import max_over_ranks, same_on_all_ranks
from automoe.verify.pool import RankPool

HERE = Path(__file__).resolve().parent
SIZES = (4, 8, 16, 32)
ROUNDS = 9
STATISTICS = 58 * (3 * 256 + 5)  # numbers of DeepSeek-V3's, about


def parts_of_a_run() -> dict[str, tuple[float, float]]:
    """Part -> milliseconds by the clock and of this process' CPU."""
    found: dict[str, tuple[float, float]] = {}

    def measure(name: str, action: Callable[[], object], rounds: int) -> None:
        seen = []
        for _ in range(rounds):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            seen.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
        found[name] = median(w for w, _ in seen), median(c for _, c in seen)

    measure("a group made", lambda: Ranks(timeout_s=600), 3)
    measure("groups opened", open_groups, 3)
    ranks = Ranks(timeout_s=600)
    measure("agreement (Ranks.all)", lambda: ranks.all(lambda: {"file": "a" * 64}), ROUNDS)
    measure("same data on all ranks", lambda: same_on_all_ranks({"file": "a" * 64}, "the data"), ROUNDS)
    measure("a step's exchange", lambda: max_over_ranks({"skip": 0.0, "stop": 0.0, "peak_memory_bytes": 1e9}), ROUNDS)
    statistics = torch.zeros(STATISTICS, dtype=torch.float64)
    measure("a step's statistics", lambda: dist.all_reduce(statistics), ROUNDS)
    return found


def main() -> None:
    pool, by_size = RankPool(max_ranks=max(SIZES)), {}
    for size in SIZES:
        pool.run(os.getpid, size)  # processes are there
        began = time.perf_counter()
        pool.run(os.getpid, size)
        joined = 1e3 * (time.perf_counter() - began)
        ranks = pool.run(parts_of_a_run, size)
        by_size[size] = {"the world joined and left": {"ms": round(joined, 1)}} | {
            part: {
                "ms": round(max(rank[part][0] for rank in ranks), 2),
                "cpu_ms": round(median(rank[part][1] for rank in ranks), 2),
            }
            for part in ranks[0]
        }
        print(size, json.dumps(by_size[size]), flush=True)
    pool.close()
    facts = {"commit": commit(), "cpu": cpu_model(), "cores": os.cpu_count(), "torch": version("torch")}
    (HERE / "results" / "many_ranks.json").write_text(json.dumps(facts | {"ranks": by_size}, indent=1) + "\n")
    draw(by_size)


def draw(by_size: dict[int, dict[str, dict[str, float]]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for part, facts in by_size[SIZES[0]].items():
        key = "cpu_ms" if "cpu_ms" in facts else "ms"
        axes.plot(SIZES, [by_size[size][part][key] for size in SIZES], marker="o", label=f"{part} ({key})")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms", xticks=SIZES, xticklabels=map(str, SIZES))
    axes.minorticks_off()
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(HERE / "results" / "many_ranks.png", dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
