"""What a MoE layer costs under different mappings of experts to the same 8 ranks, and what is sent.

The layer is built by the code that trainings use; routing is exactly balanced. Before anything is timed,
every mapping's output and gradient must equal those of the layer with all experts on each rank. Mappings take
turns, round by round; only ratios within a run count. On a CPU, 8 gloo ranks share the cores, and a rank's
wall time includes waiting for the others' turn: CPU seconds summed over ranks say what a layer costs.

    python benchmarks/moe_layer.py             # writes benchmarks/results/moe_layer.json and .png
    python benchmarks/moe_layer.py --quick     # seconds: a small layer, to check the script itself
    torchrun --nproc-per-node 8 benchmarks/moe_layer.py     # on 8 GPUs, NCCL, bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import moe_mappings
import torch
from moe_mappings import DISPATCHERS, MAPPINGS, RANKS, Size
from provenance import commit, cpu_model

GATE = {"cpu": 1e-5, "cuda": 2e-2}  # relative difference of output and gradient that is accepted
BYTES_GATE = 0.01  # of the ratio of bytes from EP/K; routing weights travel with the rows
AIM = 1.5  # all-gather's time over all-to-all's at ep8, K = 2
HERE = Path(__file__).resolve().parent
PASS_COLOURS = {"forward": "#2563a8", "backward": "#a9c6e5"}


def over_ranks(ranks: list[dict[str, Any]], name: str, rounds: int) -> list[dict[str, float]]:
    """Per round: wall seconds until the last rank is done, CPU seconds of all of them; forward and both passes."""
    table = []
    for i in range(rounds):
        steps = [rank["times"][name][i] for rank in ranks]
        table.append(
            {
                "forward_wall": max(step["forward"][0] for step in steps),
                "wall": max(step["forward"][0] + step["backward"][0] for step in steps),
                "forward_cpu": sum(step["forward"][1] for step in steps),
                "cpu": sum(step["forward"][1] + step["backward"][1] for step in steps),
            }
        )
    return table


def summarize(ranks: list[dict[str, Any]], name: str, rounds: int) -> dict[str, Any]:
    """Medians over rounds of one mapping and dispatcher."""
    table = over_ranks(ranks, name, rounds)
    mapping, _, dispatcher = name.partition(" | ")
    return {
        "mapping": mapping,
        "mesh": MAPPINGS[mapping],
        "dispatcher": dispatcher,
        "difference": max(rank["differences"][name] for rank in ranks),
        "sent_bytes_a_rank": ranks[0]["sent_bytes"][name],
        "host_syncs": ranks[0]["host_syncs"][name],
        **{f"{key}_seconds": median(row[key] for row in table) for key in table[0]},
        "rounds": table,
    }


def compare(ranks: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """All-gather over all-to-all at ep8: time of both passes, round by round; bytes."""
    tables = {d: over_ranks(ranks, f"ep8 | {d}", rounds) for d in DISPATCHERS}
    clocks = ["wall", "cpu"] if any(row["cpu"] for row in tables["alltoall"]) else ["wall"]
    times = {
        key: [a[key] / b[key] for a, b in zip(tables["allgather"], tables["alltoall"], strict=True)] for key in clocks
    }
    sent = {d: ranks[0]["sent_bytes"][f"ep8 | {d}"] for d in DISPATCHERS}
    return {
        "what": "all-gather over all-to-all at ep8: medians over rounds",
        **{key: median(ratios) for key, ratios in times.items()},
        "rounds": times,
        "bytes": sent["allgather"] / sent["alltoall"],
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """The two passes as stacked bars, one bar a mapping and dispatcher."""
    import matplotlib

    from automoe.observe.plot_style import RC, new_figure, save

    results = list(report["results"].values())
    clock = "cpu" if report["device"] == "cpu" else "wall"
    what = "CPU ms, all ranks together" if report["device"] == "cpu" else "ms on a rank"
    with matplotlib.rc_context(RC):
        figure, (axis,) = new_figure(9.6, 0.6 + 0.42 * len(results) + 1.2)
        for row, result in enumerate(results):
            forward = result[f"forward_{clock}_seconds"] * 1e3
            backward = result[f"{clock}_seconds"] * 1e3 - forward
            for left, width, colour in zip((0.0, forward), (forward, backward), PASS_COLOURS.values(), strict=True):
                axis.barh(row, width, left=left, color=colour, height=0.72, edgecolor="white", linewidth=0.5)
        handles = [matplotlib.patches.Patch(color=colour) for colour in PASS_COLOURS.values()]
        axis.set_yticks(range(len(results)), [f"{r['mapping']}, {r['dispatcher']}" for r in results])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(f"one MoE layer, {what}")
        axis.set_title(f"What a MoE layer costs, {RANKS} ranks ({report['backend']})")
        figure.legend(handles, list(PASS_COLOURS), loc="outside lower center", ncols=2)
        save(figure, path)


def print_table(report: dict[str, Any]) -> None:
    """The numbers that matter, last on the screen."""
    print(f"{'':40}{'forward':>9}{'both':>8}{'MB sent':>9}{'syncs':>6}")
    clock = "cpu" if report["device"] == "cpu" else "wall"
    for r in report["results"].values():
        print(
            f"{r['mapping'] + ', ' + r['dispatcher']:40}{1e3 * r[f'forward_{clock}_seconds']:9.1f}"
            f"{1e3 * r[f'{clock}_seconds']:8.1f}{r['sent_bytes_a_rank'] / 1e6:9.2f}{r['host_syncs']:6}"
        )
    ratio = report["allgather_over_alltoall"]
    unit = "CPU ms of all ranks" if clock == "cpu" else "ms until the last rank is done"
    print(f"{unit}, forward and both passes; megabytes of a rank's forward pass")
    print(
        f"ep8, all-gather over all-to-all: bytes {ratio['bytes']:.3f} (EP/K = {report['ep_over_k']:g}), both passes "
        + ", ".join(f"{key} {ratio[key]:.2f}" for key in ("wall", "cpu") if key in ratio)
        + f" (aim: {AIM})"
    )


def run_ranks(size: Size, rounds: int, spoil: str) -> tuple[list[dict[str, Any]], str]:
    """Every rank's measurements, and the device: this torchrun's GPUs, or 8 gloo ranks started here.

    Only rank 0 of a torchrun returns; the others end here.
    """
    if "LOCAL_RANK" not in os.environ:
        from automoe.verify.pool import RankPool

        pool = RankPool(RANKS, timeout_s=900)
        try:
            return pool.run(moe_mappings.measure, RANKS, size, rounds, "cpu", spoil), "cpu"
        finally:
            pool.close()
    import torch.distributed as dist

    from automoe.config.schema import LaunchConfig
    from automoe.launch.ranks import close_ranks, init_ranks

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != RANKS:
        raise SystemExit(f"torchrun started {world} ranks; the mappings are for {RANKS}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    init_ranks(LaunchConfig(device=device), rank, world, int(os.environ["LOCAL_RANK"]), None)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, moe_mappings.measure(size, rounds, device, spoil))
    close_ranks()
    if rank:
        raise SystemExit(0)
    return gathered, device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a small layer and two rounds: checks the script, not speed"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rank (default 1024)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument("--width", type=int, default=128, help="expert width (default 128)")
    parser.add_argument("--experts", type=int, default=8, help="number of experts (default 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token (default 2)")
    parser.add_argument("--spoil", default="", help="change this contender's weights: the check must find it")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results" / "moe_layer.json", help="where the JSON goes, and a PNG"
    )
    args = parser.parse_args()
    size = Size(args.tokens, args.hidden, args.width, args.experts, args.top_k)
    rounds = args.rounds
    if args.quick:
        size, rounds = Size(64, 32, 16, 8, 2), 2

    ranks, device = run_ranks(size, rounds, args.spoil)
    for name in ranks[0]["differences"]:
        worst = max(rank["differences"][name] for rank in ranks)
        if not worst <= GATE[device]:
            raise SystemExit(
                f"{name}: differs from the layer with all experts on each rank by {worst:.1e}; {GATE[device]:.0e} is "
                "allowed. Nothing was written."
            )
    names = list(ranks[0]["times"])
    report: dict[str, Any] = {
        "what": "one MoE layer, forward and backward, balanced routing, by mapping",
        "quick": args.quick,
        "commit": commit(
            "../automoe/moe", "../automoe/parallel/expert.py", "../automoe/parallel/collectives.py", "moe_*.py"
        ),
        "device": device,
        "backend": "gloo on CPU" if device == "cpu" else f"NCCL on {torch.cuda.get_device_name()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "python": platform.python_version(),
        "versions": {"torch": version("torch")},
        "gate_tolerance": GATE[device],
        "ranks": RANKS,
        "tokens_a_rank": size.tokens,
        "hidden": size.hidden,
        "width": size.width,
        "experts": size.experts,
        "top_k": size.top_k,
        "ep_over_k": RANKS / size.top_k,
        "results": {name: summarize(ranks, name, rounds) for name in names},
        "allgather_over_alltoall": compare(ranks, rounds),
    }
    if not abs(report["allgather_over_alltoall"]["bytes"] / report["ep_over_k"] - 1) < BYTES_GATE + 1 / size.hidden:
        raise SystemExit(
            f"all-gather sent {report['allgather_over_alltoall']['bytes']:.3f} times the bytes of all-to-all, and "
            f"EP/K = {report['ep_over_k']:g}. Nothing was written."
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    picture = args.out.with_suffix(".png")
    draw(report, picture)
    print(f"written to {args.out} and {picture.name}\n")
    print_table(report)


if __name__ == "__main__":
    main()
