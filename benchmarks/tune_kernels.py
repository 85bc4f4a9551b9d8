"""Which blocks are fastest for each product of the Triton experts, on one GPU.

Every product is timed alone, with every candidate of ``measuring.candidates`` in turns, at the layers of
``moe_kernel.py``. A candidate must first give what float32 gives, into memory that was poisoned. What wins is for a person
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

import measuring  # noqa: F401  (puts the checkout on the path)
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernel_peers import Shape
from measuring import PEAK, candidates, commit, result_file, seconds
from moe_kernel import SHAPES, Inputs, choices, poison

from automoe.kernels import launches
from automoe.kernels.tiling import HOPPER, row_tiles, tile_height
from automoe.moe.dispatch.base import sort_by_expert
from automoe.observe.environment import describe_environment

CASES = [name for name in SHAPES if "whole" not in name]
QUICK = {"small": Shape(24, 64, 48, 4, 2)}
TOLERANCE = 1e-2  # relative, of bfloat16

Results = tuple[torch.Tensor, ...]


def products(
    shape: Shape, routing: str, device: torch.device
) -> Iterator[tuple[str, int, Callable[[], Results], Results]]:
    """(name, FLOPs, what computes it, what that has to be), expert after expert in float32."""
    inputs, ids = Inputs(shape, device), choices(routing, shape, device)
    x, gate_up_proj, down_proj = (leaf.detach() for leaf in (inputs.x, inputs.gate_up_proj, inputs.down_proj))
    order, counts = sort_by_expert(ids, shape.experts)
    gather_idx, offsets = order // shape.top_k, counts.cumsum(0).int()
    probs, num_rows = inputs.weights.detach().flatten()[order], order.numel()
    tiles = row_tiles(offsets, num_rows, tile_height(num_rows, shape.experts))
    one = 2 * num_rows * shape.hidden * shape.width
    rows, grad_out, scale = x[gather_idx], inputs.grad[gather_idx], probs[:, None]

    def by_expert(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(counts.tolist()), weights, strict=True)
        return torch.cat([(part.float() @ weight.float()).to(rows.dtype) for part, weight in parts])

    def over_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        parts = zip(*(each.split(counts.tolist()) for each in (left, right)), strict=True)
        return torch.stack([(a.float().T @ b.float()).to(left.dtype) for a, b in parts])

    pre = by_expert(rows, gate_up_proj.flatten(1, 2).transpose(1, 2))
    gate, up = pre.float().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    value = gate * sigmoid * up
    act = (value * scale).to(x.dtype)
    yield (
        "up",
        2 * one,
        lambda: launches.gather_up_activate(x, gather_idx, gate_up_proj, None, probs, tiles, None),
        (pre, act),
    )
    expected = by_expert(act, down_proj.transpose(1, 2))
    yield "down", one, lambda: (launches.rows_times_weights("down", act, down_proj, tiles),), (expected,)

    grad = by_expert(grad_out, down_proj).float()
    by_gate, by_up = up * sigmoid * (1 + gate * (1 - sigmoid)), gate * sigmoid
    grad_pre = torch.cat((grad * scale * by_gate, grad * scale * by_up), dim=1).to(x.dtype)
    grad_probs = (grad * value).sum(1)
    del gate, up, sigmoid, value, grad, by_gate, by_up

    def back() -> Results:
        *found, shares = launches.grad_down_activate(grad_out, down_proj, probs, pre, tiles, None)
        return *found, shares.sum(1)

    yield "back", one, back, (grad_pre, act, grad_probs)
    both = gate_up_proj.flatten(1, 2)
    expected = by_expert(grad_pre, both)
    yield (
        "grad_rows",
        2 * one,
        lambda: (launches.rows_times_weights("grad_rows", grad_pre, both, tiles),),
        (expected,),
    )

    into_down, into_up = torch.full_like(down_proj, torch.nan), torch.full_like(gate_up_proj, torch.nan)
    yield (
        "grad_weights",
        one,
        lambda: (launches.grad_weights(grad_out, act, None, offsets, into_down),),
        (over_rows(grad_out, act),),
    )
    yield (
        "grad_weights_gathered",
        2 * one,
        lambda: (launches.grad_weights(grad_pre, x, gather_idx, offsets, into_up),),
        (over_rows(grad_pre, rows).view_as(into_up),),
    )


def measure(
    product: str, flops: int, work: Callable[[], Results], expected: Results, device: torch.device, budget_s: float
) -> list[dict[str, Any]]:
    """Every candidate of a product: checked, then timed in turns until the budget is spent."""
    found: list[dict[str, Any]] = [{"blocks": vars(blocks)} for blocks in candidates(product)]
    running = []
    poison(device)
    for blocks, facts in zip(candidates(product), found, strict=True):
        launches.blocks_of = lambda *_, blocks=blocks: blocks
        try:
            got = work()
            facts["difference"] = max(map(difference, got, expected))
            for result in got:  # the next candidate is given this memory again
                result.fill_(torch.nan)
        except Exception as error:  # too much shared memory, or what a release of Triton cannot compile
            facts["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if not facts["difference"] <= TOLERANCE:  # NaN is not either
            facts["failed"] = f"differs from float32 by {facts['difference']:.1e}"
            continue
        running.append((blocks, facts))
    end, rounds = time.monotonic() + budget_s, 0
    while running and (rounds < 3 or time.monotonic() < end):
        for blocks, facts in running:
            launches.blocks_of = lambda *_, blocks=blocks: blocks
            facts.setdefault("seconds", []).append(seconds(work, device))
        rounds += 1
    for _, facts in running:
        facts["tflops"] = flops / max(median(facts["seconds"]), 1e-12) / 1e12
    return found


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in float32; NaN where something was not written."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def print_table(report: dict[str, Any]) -> None:
    """Each product's chosen blocks and the fastest, last on the screen."""
    print(f"{'':62}{'TFLOPS':>8}{'of peak':>9}  fastest of the candidates, TFLOPS")
    for case, found in report["cases"].items():
        for product, rows in found.items():
            title = f"{case}: {product}"
            timed = [row for row in rows if "tflops" in row]
            best = max(timed, key=lambda row: row["tflops"], default=rows[0])
            plain = ", ".join(f"{key} {value}" for key, value in best["blocks"].items() if value)
            chosen, most = (row.get("tflops", 0.0) for row in (rows[0], best))
            print(f"{title:62}{chosen:8.2f}{chosen * 1e12 / PEAK:9.1%}  {most:.2f}: {plain}")
            for row in rows:
                if "failed" in row:
                    print(f"{'':4}not timed: {row['blocks']}: {row['failed'][:120]}")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small layer, on the CPU where there is no GPU")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all timings together")
    parser.add_argument("--routing", default="balanced", help="balanced, zipf or empty")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results; the temporary folder with --quick")
    args = parser.parse_args()
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --quick checks the script itself without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = result_file(args.out, "tune_kernels", args.quick)
    shapes = QUICK if args.quick else {name: SHAPES[name] for name in CASES}
    report: dict[str, Any] = {
        "commit": commit("../automoe/kernels", "measuring.py", "tune_kernels.py"),
        "environment": describe_environment(),
        "quick": args.quick,
        "routing": args.routing,
        "cases": {},
    }
    budget_s = 0.0 if args.quick else args.seconds / len(shapes) / len(HOPPER)
    with torch.no_grad():
        for name, shape in shapes.items():
            found = report["cases"][name] = {}
            for product, flops, work, expected in products(shape, args.routing, device):
                found[product] = measure(product, flops, work, expected, device, budget_s)
                out.write_text(json.dumps(report, indent=1) + "\n")  # what is measured is kept
    print_table(report)


if __name__ == "__main__":
    main()
