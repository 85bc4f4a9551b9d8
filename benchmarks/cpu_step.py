"""Tokens per CPU second of a training step on one core, ours and other trainers, same model and weights.

A step is forward, backward, AdamW update and gradient zeroing in float32, one process, one thread. Contenders
take turns, step by step, so that noise of the machine meets all of them; only ratios within a run count.
Before anything is timed, our loss and every gradient must equal those of ``transformers``.

    python benchmarks/cpu_step.py             # about four minutes; writes benchmarks/results/cpu_step.json
    python benchmarks/cpu_step.py --quick     # seconds: a small model, to check the script itself
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import (
    SHAPES,
    Contender,
    StepTimes,
    gate_differences,
    our_contender,
    random_batch,
    transformers_contender,
)
from floors import measure_floors
from provenance import commit, cpu_model
from titan import WHY, measure_torchtitan_experts
from torch.utils._python_dispatch import TorchDispatchMode

GATE = 1e-4  # relative difference of loss and gradients that is accepted
HERE = Path(__file__).resolve().parent


def take_turns(
    contenders: list[Contender], tokens: torch.Tensor, labels: torch.Tensor, rounds: int
) -> dict[str, list[StepTimes]]:
    """One untimed step each, then ``rounds`` rounds of one step each.

    A contender that needs over three times the fastest step sits out after two rounds: its ratio is known well
    enough, and the run stays short.
    """
    for contender in contenders:
        contender.step(tokens, labels)
    times: dict[str, list[StepTimes]] = {contender.name: [] for contender in contenders}
    for round_index in range(rounds):
        for contender in contenders:
            best = min(median(t.total for t in seen) for seen in times.values()) if round_index >= 2 else 0.0
            if round_index >= 2 and median(t.total for t in times[contender.name]) > 3 * best:
                continue
            times[contender.name].append(contender.step(tokens, labels))
    return times


def summarize(times: list[StepTimes], ours: list[StepTimes], tokens: int) -> dict[str, Any]:
    """Medians, and how many times our rate is this contender's, round by round."""
    ratios = [theirs.total / own.total for theirs, own in zip(times, ours, strict=False)]
    return {
        "tokens_per_cpu_second": tokens / median(t.total for t in times),
        "step_seconds": median(t.total for t in times),
        "forward_seconds": median(t.forward for t in times),
        "backward_seconds": median(t.backward for t in times),
        "optimizer_seconds": median(t.optimizer for t in times),
        "ours_over_this": median(ratios),
        "ours_over_this_rounds": ratios,
        "step_seconds_rounds": [t.total for t in times],
    }


class OperatorClock(TorchDispatchMode):
    """CPU seconds of every operator below autograd. torch.profiler's are wall time, which other processes stretch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.process_time()
        result = func(*args, **(kwargs or {}))
        self.seconds[func.overloadpacket.__name__] += time.process_time() - start
        self.calls[func.overloadpacket.__name__] += 1
        return result


def profile_step(contender: Contender, tokens: torch.Tensor, labels: torch.Tensor) -> list[dict[str, Any]]:
    """Operators of one step by CPU time, the largest first, until 97% of it is named; the rest of the step last."""
    with OperatorClock() as clock:
        step = contender.step(tokens, labels).total
    rows, seen = [], 0.0
    for operator, seconds in clock.seconds.most_common():
        rows.append({"operator": operator, "calls": clock.calls[operator], "seconds": seconds})
        seen += seconds
        if seen > 0.97 * clock.seconds.total():
            break
    rows.append({"operator": "all else", "calls": 0, "seconds": step - seen})
    return [{**row, "share": row["seconds"] / step} for row in rows]


def measure(shape: str, rows: int, seq_len: int, rounds: int, size: dict[str, int]) -> dict[str, Any]:
    """Gate, turns, breakdown and floors of one model."""
    config = SHAPES[shape](**size)
    tokens, labels = random_batch(config, rows, seq_len)
    peers = [transformers_contender(config, experts, seed=0) for experts in ("grouped_mm", "eager")]
    ours = our_contender(config, peers[0])
    gates = {}
    for peer in peers:
        loss_difference, gradient_differences = gate_differences(ours, peer, tokens, labels)
        worst = max(gradient_differences, key=lambda name: gradient_differences[name])
        gates[peer.name] = {
            "loss": loss_difference,
            "worst_gradient": gradient_differences[worst],
            "worst_gradient_name": worst,
        }
        if max(loss_difference, gradient_differences[worst]) > GATE:
            raise SystemExit(
                f"{shape}: loss differs from {peer.name} by {loss_difference:.1e}, the gradient of {worst} by "
                f"{gradient_differences[worst]:.1e}; {GATE:.0e} is allowed. Nothing was timed."
            )
    times = take_turns([ours, *peers], tokens, labels, rounds)
    results = {name: summarize(seen, times[ours.name], tokens.numel()) for name, seen in times.items()}
    breakdown = {contender.name: profile_step(contender, tokens, labels) for contender in (ours, peers[0])}
    best = max((name for name in results if name != ours.name), key=lambda n: results[n]["tokens_per_cpu_second"])
    num_parameters = sum(p.numel() for p in ours.model.parameters())
    del ours, peers
    gc.collect()
    floors = measure_floors(config, rows, seq_len, num_parameters)
    titan = measure_torchtitan_experts(config, rows * seq_len, rounds)
    return {
        "rows": rows,
        "seq_len": seq_len,
        "parameters": num_parameters,
        "config": repr(config),
        "gate": gates,
        "results": results,
        "best_other": best,
        "ours_over_best_other": results[best]["ours_over_this"],
        "floors": floors,
        "floor_over_ours": floors["seconds"] / results["automoe"]["step_seconds"],
        "breakdown": breakdown,
        "torchtitan_experts": titan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a small model and two rounds: checks the script, not speed"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contender (default 7)")
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append", help="only this model; may be repeated")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu_step.json", help="where the JSON goes")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # a piped run shows each model as it ends
    torch.set_num_threads(1)
    size = {"vocab": 512, "layers": 2, "hidden": 128} if args.quick else {}
    rows, seq_len = (2, 64) if args.quick else (4, 512)
    rounds = 2 if args.quick else args.rounds

    report: dict[str, Any] = {
        "what": "tokens per CPU second of one training step: forward, backward, AdamW, gradient zeroing",
        "quick": args.quick,
        "commit": commit("../automoe/model", "../automoe/moe", "../automoe/optim", "*.py"),
        "cpu": cpu_model(),
        "threads": 1,
        "dtype": "float32",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "torchtitan")},
        "gate_tolerance": GATE,
        "absent": {"torchtitan": WHY},
        "models": {},
    }
    for shape in args.shape or SHAPES:
        model = measure(shape, rows, seq_len, rounds, size)
        report["models"][shape] = model
        print(
            f"\n{shape}: {model['parameters'] / 1e6:.1f} M parameters, {rows} x {seq_len} tokens, gate {model['gate']}"
        )
        print(f"{'':26}tokens/CPU-s   step   forward backward optimizer  ours/this (min-max)")
        for name, r in model["results"].items():
            ratios = r["ours_over_this_rounds"]
            print(
                f"{name:26}{r['tokens_per_cpu_second']:12.0f}{r['step_seconds']:7.3f}{r['forward_seconds']:10.3f}"
                f"{r['backward_seconds']:9.3f}{r['optimizer_seconds']:10.3f}{r['ours_over_this']:11.2f}"
                f" ({min(ratios):.2f}-{max(ratios):.2f})"
            )
        floors = model["floors"]
        print(
            f"{'floor of torch':26}{floors['tokens_per_cpu_second']:12.0f}{floors['seconds']:7.3f}   products "
            f"{floors['gemm_seconds']:.3f} ({floors['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s), attention "
            f"{floors['attention_seconds']:.3f}, optimizer bytes {floors['optimizer_seconds']:.3f}"
        )
        for name, r in model["torchtitan_experts"].items():
            print(f"    experts alone, {name:20}{r['seconds']:9.3f} s, difference {r['difference']:.0e}")
        for row in model["breakdown"]["automoe"][:20]:
            print(f"    {row['operator']:54}{row['calls']:6}{row['seconds']:9.3f}{row['share']:7.1%}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
