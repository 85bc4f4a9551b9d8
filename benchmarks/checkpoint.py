"""What a checkpoint costs, compared with a raw write with fsync and with plain torch.distributed.checkpoint.

    make bench-checkpoint

Contenders take turns in every round, on the same ranks, state and disk; files are dropped from the page cache
before they are read. Each save is loaded into a state of zeros and compared to the bit before its time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from provenance import commit

from automoe.observe.metrics import describe_environment

HERE = Path(__file__).parent
SLACK_BYTES = 32 << 20  # of memory that a save may take besides: buffers, plans, the allocator's pages


def run_ranks(size: int, hidden: int, layers: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """What ``size`` ranks measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += [str(HERE / "checkpoint_ranks.py"), str(folder), str(hidden), str(layers), str(rounds)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-6000:]}\nNothing was written.")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def summarize(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One table from all ranks: a round takes as long as its slowest rank; CPU seconds are summed."""
    total = sum(rank["bytes"] for rank in ranks)

    def seconds(name: str) -> dict[str, Any]:
        rounds = [max(times) for times in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        return {"seconds": median(rounds), "gb_per_s": total / 1e9 / median(rounds), "rounds": rounds}

    def cpu(name: str) -> float:
        return median(sum(times) for times in zip(*(rank["cpu"][name] for rank in ranks), strict=True))

    def async_over_plain(kind: str) -> dict[str, float]:
        alone = median(value for rank in ranks for value in rank["seconds"]["product_alone"])
        slowed = median(value for rank in ranks for value in rank["seconds"][f"product_during_{kind}"])
        return {
            "blocks_s": seconds(f"plain_{kind}_begin")["seconds"],
            "total_s": seconds(f"plain_{kind}_total")["seconds"],
            "cpu_s": cpu(f"plain_{kind}"),
            "products_slowed_by": slowed / alone,
        }

    names = ("raw_write", "plain_save", "save", "plain_load", "load", "memory_copy")
    memory = {
        name: max(max(rank["memory"][name]) for rank in ranks)
        for name in ("save", "load", "plain_save", "plain_load", "async_begin_first", "async_rest")
    }
    return {
        "state_bytes": total,
        "state_bytes_a_rank": [rank["bytes"] for rank in ranks],
        "largest_tensor_bytes": max(rank["largest_tensor"] for rank in ranks),
        "rates": {name: seconds(name) for name in names},
        "save_over_raw_write": seconds("save")["seconds"] / seconds("raw_write")["seconds"],
        "save_over_plain": seconds("save")["seconds"] / seconds("plain_save")["seconds"],
        "load_over_plain": seconds("load")["seconds"] / seconds("plain_load")["seconds"],
        "blocked": {
            "save_s": seconds("save")["seconds"],
            "async_first_s": seconds("async_begin_first")["seconds"],
            "async_s": seconds("async_begin")["seconds"],
            "memory_copy_s": seconds("memory_copy")["seconds"],
        },
        "cpu_seconds": {
            "hash": cpu("hash"),
            "raw_write": cpu("raw_write"),
            "plain_save": cpu("plain_save"),
            "save": cpu("save"),
            "async_save": cpu("async_begin_first") + cpu("async_rest"),
            "plain_load": cpu("plain_load"),
            "load": cpu("load"),
        },
        "memory_above_state_bytes": memory,
        "async_of_plain_dcp": {kind: async_over_plain(kind) for kind in ("thread", "process")},
    }


def check_memory(result: dict[str, Any]) -> None:
    """The promises: one tensor above the state for a save, one copy of it for one in the background."""
    largest, copy = result["largest_tensor_bytes"], max(result["state_bytes_a_rank"])
    memory = result["memory_above_state_bytes"]
    for name, allowed in (("save", largest), ("async_begin_first", copy), ("async_rest", largest)):
        if memory[name] > allowed + SLACK_BYTES:
            raise SystemExit(
                f"{name} took {memory[name] / 1e6:.0f} MB above the state, and {(allowed + SLACK_BYTES) / 1e6:.0f} are "
                "allowed. Nothing was written."
            )


def print_table(report: dict[str, Any]) -> None:
    result = report["results"]
    print(f"state {result['state_bytes'] / 1e9:.2f} GB over {report['ranks']} ranks")
    for name, rate in result["rates"].items():
        print(f"  {name:<12} {rate['seconds']:8.2f} s {rate['gb_per_s']:7.2f} GB/s")
    print("  seconds the loop stands still:", {k: round(v, 3) for k, v in result["blocked"].items()})
    print("  CPU seconds, all ranks:", {k: round(v, 2) for k, v in result["cpu_seconds"].items()})
    print("  MB above the state:", {k: v // 1_000_000 for k, v in result["memory_above_state_bytes"].items()})
    print(f"  largest tensor: {result['largest_tensor_bytes'] / 1e6:.0f} MB")
    for kind, cost in result["async_of_plain_dcp"].items():
        print(f"  plain async by {kind}:", {k: round(v, 3) for k, v in cost.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small state, one round: checks the script, not speed")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument("--layers", type=int, default=3, help="layers (default 3)")
    parser.add_argument("--dir", type=Path, default=None, help="disk to write to (default: the temporary folder's)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "checkpoint.json", help="where the JSON goes")
    args = parser.parse_args()
    hidden, layers, rounds = (64, 2, 1) if args.quick else (args.hidden, args.layers, args.rounds)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        ranks = run_ranks(args.ranks, hidden, layers, rounds, Path(folder))
    result = summarize(ranks)
    check_memory(result)
    report = {
        "what": "saving and loading the training state, compared with a raw write and plain torch.distributed.checkpoint",
        "quick": args.quick,
        "commit": commit(),
        "environment": describe_environment(),
        "load_average_before": load_before,
        "ranks": args.ranks,
        "rounds": rounds,
        "results": result,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
