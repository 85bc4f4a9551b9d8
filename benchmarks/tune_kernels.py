"""Which blocks are fastest for each product of the Triton experts, on one GPU.

Every product is timed alone, with every candidate of ``automoe.moe.kernels.blocks`` in turns, at the layers of
``moe_kernel.py``. A candidate must give the numbers of the chosen blocks first, memory poisoned. What wins is for a person
to write into ``HOPPER``: a choice made anew on each machine would give each machine its own rounding.

    python benchmarks/tune_kernels.py            # on a GPU, under 9 minutes: writes benchmarks/results/tune_kernels.json
    python benchmarks/tune_kernels.py --quick    # anywhere: a small layer, in Triton's interpreter without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import checkout  # noqa: F401
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernel_peers import Shape
from measuring import PEAK, result_file, seconds
from moe_kernel import SHAPES, Inputs, choices, poison
from provenance import commit

from automoe.moe.activation import SWIGLU
from automoe.moe.dispatch.base import sort_by_expert
from automoe.moe.kernels import launches
from automoe.moe.kernels.blocks import HOPPER, Blocks, candidates
from automoe.moe.kernels.tiles import row_tiles, tile_height
from automoe.observe.environment import describe_environment

CASES = [name for name in SHAPES if "whole" not in name]
QUICK = {"small": Shape(24, 64, 48, 4, 2)}
TOLERANCE = 1e-2  # relative; sums of other blocks are rounded otherwise

Results = tuple[torch.Tensor, ...]


def products(
    shape: Shape, routing: str, device: torch.device
) -> Iterator[tuple[str, int, Callable[[Blocks], Results]]]:
    """(name, FLOPs, what computes it with given blocks), each on what those before it computed."""
    inputs, ids = Inputs(shape, device), choices(routing, shape, device)
    x, w_gate_up, w_down = (leaf.detach() for leaf in (inputs.x, inputs.w_gate_up, inputs.w_down))
    order, counts = sort_by_expert(ids, shape.experts)
    gather_idx, offsets = order // shape.top_k, counts.cumsum(0).int()
    probs, rows = inputs.weights.detach().flatten()[order], order.numel()
    tiles = row_tiles(offsets, rows, tile_height(rows, shape.experts))
    one = 2 * rows * shape.hidden * shape.width

    def up(blocks: Blocks) -> Results:
        return launches.gather_up_activate(x, gather_idx, w_gate_up, None, probs, tiles, SWIGLU, blocks)

    yield "up", 2 * one, up
    pre, act = up(HOPPER["up"])
    yield "down", one, lambda blocks: (launches.down(act, w_down, None, probs, tiles, blocks),)
    grad_out = inputs.grad[gather_idx]

    def back(blocks: Blocks) -> Results:
        grad_pre, act, shares = launches.grad_down_activate(
            grad_out, w_down, probs, pre, tiles, SWIGLU, blocks
        )
        return grad_pre, act, shares.sum(1)

    yield "back", one, back
    grad_pre, *_ = back(HOPPER["back"])
    yield "grad_rows", 2 * one, lambda blocks: (launches.grad_rows(grad_pre, w_gate_up, tiles, blocks),)
    into_down, into_up = torch.empty_like(w_down), torch.empty_like(w_gate_up)
    yield (
        "grad_weights",
        one,
        lambda blocks: (launches.grad_weights(grad_out, act, None, offsets, into_down, blocks),),
    )
    yield (
        "grad_weights_gathered",
        2 * one,
        lambda blocks: (launches.grad_weights(grad_pre, x, gather_idx, offsets, into_up, blocks),),
    )


def measure(
    product: str, flops: int, work: Callable[[Blocks], Results], device: torch.device, budget_s: float
) -> list[dict[str, Any]]:
    """Every candidate of a product: checked, then timed in turns until the budget is spent."""
    expected = [result.clone() for result in work(HOPPER[product])]
    found = [{"blocks": vars(blocks)} for blocks in candidates(product)]
    running = []
    for blocks, facts in zip(candidates(product), found, strict=True):
        poison(device)
        try:
            got = work(blocks)
        except Exception as error:  # too much shared memory, or what a release of Triton cannot compile
            facts["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        facts["difference"] = max(
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(got, expected, strict=True)
        )
        if not facts["difference"] <= TOLERANCE:  # NaN is not either
            facts["failed"] = f"differs from the chosen blocks by {facts['difference']:.1e}"
            continue
        running.append((blocks, facts))
    end, rounds = time.monotonic() + budget_s, 0
    while rounds < 3 or time.monotonic() < end:
        for blocks, facts in running:
            facts.setdefault("seconds", []).append(seconds(lambda blocks=blocks: work(blocks), device))
        rounds += 1
    for _, facts in running:
        facts["tflops"] = flops / max(median(facts["seconds"]), 1e-12) / 1e12
    return found


def print_table(report: dict[str, Any]) -> None:
    """Each product's chosen blocks and the fastest, last on the screen."""
    print(f"{'':62}{'TFLOPS':>8}{'of peak':>9}  fastest of the candidates, TFLOPS")
    for case, found in report["cases"].items():
        for product, rows in found.items():
            title = f"{case}: {product}"
            timed = [row for row in rows if "tflops" in row]
            best = max(timed, key=lambda row: row["tflops"])
            plain = ", ".join(f"{key} {value}" for key, value in best["blocks"].items() if value)
            chosen = rows[0].get("tflops", 0.0)
            print(f"{title:62}{chosen:8.2f}{chosen * 1e12 / PEAK:9.1%}  {best['tflops']:.2f}: {plain}")
            for row in rows:
                if "failed" in row:
                    print(f"{'':4}not timed: {row['blocks']}: {row['failed'][:120]}")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small layer, on the CPU where there is no GPU"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="for all timings together")
    parser.add_argument("--routing", default="balanced", help="balanced, zipf or empty")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results; the temporary folder with --quick"
    )
    args = parser.parse_args()
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --quick checks the script itself without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = result_file(args.out, "tune_kernels", args.quick)
    shapes = QUICK if args.quick else {name: SHAPES[name] for name in CASES}
    report: dict[str, Any] = {
        "commit": commit("../automoe/moe/kernels", "measuring.py", "tune_kernels.py"),
        "environment": describe_environment(),
        "quick": args.quick,
        "routing": args.routing,
        "cases": {},
    }
    budget_s = 0.0 if args.quick else args.seconds / len(shapes) / len(HOPPER)
    with torch.no_grad():
        for name, shape in shapes.items():
            found = report["cases"][name] = {}
            for product, flops, work in products(shape, args.routing, device):
                found[product] = measure(product, flops, work, device, budget_s)
                out.write_text(json.dumps(report, indent=1) + "\n")  # what is measured is kept
    print_table(report)


if __name__ == "__main__":
    main()
