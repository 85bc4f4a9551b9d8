"""Tokens per CPU second of a training step on one core, ours and other trainers, same model and weights.

A step is forward, backward, AdamW update and gradient zeroing in float32 on one thread. Each contender has a process
of its own, ours one that is begun as the launcher begins ranks, and they take turns, step by step, so that noise of
the machine meets all of them; only ratios within a run count. Ours is the whole step of the recipe; the bare loop of
the others over our decoder, in a process like theirs, stands beside it. Before anything is timed, all losses and gradients must be equal. NeMo Automodel is there if it is installed
(``requirements-peers.txt``), and said to be absent if not.

    python benchmarks/cpu_step.py             # about a quarter of an hour; writes benchmarks/results/cpu_step.json
    python benchmarks/cpu_step.py --quick     # seconds: a small model, to check the script itself
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from contenders import (
    SHAPES,
    Contender,
    Recipe,
    StepTimes,
    all_contenders,
    gate_differences,
    random_batch,
    transformers_model,
)
from floors import measure_floors
from provenance import commit, cpu_model
from titan import WHY, measure_torchtitan_experts
from torch.utils._python_dispatch import TorchDispatchMode

from automoe.config.compose import compose_config
from automoe.config.schema import ModelConfig

GATE = 1e-4  # relative difference of loss and gradients that is accepted
HERE = Path(__file__).resolve().parent
PROFILED = ("automoe", "automoe decoder", "transformers grouped_mm")
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and labels, [B, S] each


def in_child(work: Callable[[Connection], None]) -> tuple[Connection, Any]:
    """``work`` in a process forked from this one, which has imported all and computed nothing, and the pipe to it."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(there,), daemon=True)
    process.start()
    there.close()
    return here, process


def answer(pipe: Connection) -> Any:
    """What the process at the other end sends; a traceback of its own is on the terminal if it died."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        raise SystemExit("a contender's process died: see above") from None


def once(work: Callable[[], Any]) -> Any:
    """The result of ``work`` in a process of its own."""
    pipe, process = in_child(lambda end: end.send(work()))
    result = answer(pipe)
    process.join()
    return result


def next_wish(pipe: Connection, parent: int) -> str:
    """What the parent wants; ``stop`` where it is gone. Its end of the pipe does not close, as siblings have it too."""
    while not pipe.poll(1):
        if os.getppid() != parent:
            return "stop"
    return pipe.recv()


class Turns:
    """A contender in a process of its own, where what one does to malloc is done to no other."""

    def __init__(self, name: str, build: Callable[[], Contender | Recipe], batch: Batch) -> None:
        parent = os.getpid()

        def serve(end: Connection) -> None:
            contender = build()
            while (wanted := next_wish(end, parent)) != "stop":
                if wanted == "gradients":
                    loss, gradients = contender.loss_and_gradients(*batch)
                    end.send((loss, {key: gradient.numpy() for key, gradient in gradients.items()}))
                else:
                    end.send(contender.step(*batch) if wanted == "step" else profile_step(contender, batch))

        self.name = name
        self.pipe, self.process = in_child(serve)

    def ask(self, wanted: str) -> Any:
        self.pipe.send(wanted)
        return answer(self.pipe)

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        loss, arrays = self.ask("gradients")
        return loss, {key: torch.from_numpy(array) for key, array in arrays.items()}

    def stop(self) -> None:
        self.pipe.send("stop")
        self.process.join()


def take_turns(contenders: list[Turns], rounds: int) -> dict[str, list[StepTimes]]:
    """One untimed step each, then ``rounds`` rounds of one step each.

    A contender that needs over three times the fastest step sits out after two rounds: its ratio is known well
    enough, and the run stays short.
    """
    for contender in contenders:
        contender.ask("step")
    times: dict[str, list[StepTimes]] = {contender.name: [] for contender in contenders}
    for round_index in range(rounds):
        for contender in contenders:
            best = min(median(t.total for t in seen) for seen in times.values()) if round_index >= 2 else 0.0
            if round_index >= 2 and median(t.total for t in times[contender.name]) > 3 * best:
                continue
            times[contender.name].append(contender.ask("step"))
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


def profile_step(contender: Contender | Recipe, batch: Batch) -> list[dict[str, Any]]:
    """Operators of one step by CPU time, the largest first, until 97% of it is named; the rest of the step last."""
    with OperatorClock() as clock:
        step = contender.step(*batch).total
    rows, seen = [], 0.0
    for operator, seconds in clock.seconds.most_common():
        rows.append({"operator": operator, "calls": clock.calls[operator], "seconds": seconds})
        seen += seconds
        if seen > 0.97 * clock.seconds.total():
            break
    rows.append({"operator": "all else", "calls": 0, "seconds": step - seen})
    return [{**row, "share": row["seconds"] / step} for row in rows]


def hold_gate(shape: str, contenders: list[Turns]) -> dict[str, dict[str, Any]]:
    """The loss and every gradient of all others must be those of the first, or nothing is timed."""
    ours, gates = contenders[0].gradients(), {}
    for peer in contenders[1:]:
        loss_difference, gradient_differences = gate_differences(ours, peer.gradients(), peer.name)
        worst = max(gradient_differences, key=lambda name: gradient_differences[name])
        gates[peer.name] = {
            "loss": loss_difference,
            "worst_gradient": gradient_differences[worst],
            "worst_gradient_name": worst,
        }
        if not max(loss_difference, gradient_differences[worst]) <= GATE:
            raise SystemExit(
                f"{shape}: loss differs from {peer.name} by {loss_difference:.1e}, the gradient of {worst} by "
                f"{gradient_differences[worst]:.1e}; {GATE:.0e} is allowed. Nothing was timed."
            )
    return gates


def write_reference(config: ModelConfig, folder: str) -> int:
    """The checkpoint that all contenders begin with; returns how many parameters it has."""
    torch.manual_seed(0)
    model = transformers_model(config, "eager")
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def measure(shape: str, config: ModelConfig, rows: int, seq_len: int, rounds: int) -> dict[str, Any]:
    """Gate, turns, breakdown and floors of one model."""
    batch = random_batch(config, rows, seq_len)
    with TemporaryDirectory() as folder:
        num_parameters = once(lambda: write_reference(config, folder))
        builders, absent = all_contenders(config, folder, rows, seq_len)
        contenders = [Turns(name, build, batch) for name, build in builders.items()]
        gates = hold_gate(shape, contenders)
        times = take_turns(contenders, rounds)
        breakdown = {turns.name: turns.ask("profile") for turns in contenders if turns.name in PROFILED}
        for contender in contenders:
            contender.stop()
    results = {name: summarize(seen, times["automoe"], rows * seq_len) for name, seen in times.items()}
    others = [name for name in results if not name.startswith("automoe")]
    best = max(others, key=lambda n: results[n]["tokens_per_cpu_second"])
    floors = once(lambda: measure_floors(config, rows, seq_len, num_parameters))

    return {
        "rows": rows,
        "seq_len": seq_len,
        "parameters": num_parameters,
        "config": repr(config),
        "absent": absent,
        "gate": gates,
        "results": results,
        "best_other": best,
        "ours_over_best_other": results[best]["ours_over_this"],
        "decoder_over_best_other": median(
            other.total / own.total for other, own in zip(times[best], times["automoe decoder"], strict=False)
        ),
        "floors": floors,
        "floor_over_ours": floors["seconds"] / results["automoe"]["step_seconds"],
        "breakdown": breakdown,
        "torchtitan_experts": once(lambda: measure_torchtitan_experts(config, rows * seq_len, rounds)),
    }


def versions(*names: str) -> dict[str, str | None]:
    """Of installed packages; None: it is not."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a small model and two rounds: checks the script, not speed"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contender (default 7)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=sorted(SHAPES), action="append", help="only this model; may be repeated")
    which.add_argument(
        "--model",
        action="append",
        help="of the configurations instead, 4 rows of 256 tokens: small_dsv3; may be repeated",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu_step.json", help="where the JSON goes")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # a piped run shows each model as it ends
    torch.set_num_threads(1)
    size = {"vocab": 512, "layers": 2, "hidden": 128} if args.quick else {}
    batch = (2, 64) if args.quick else (4, 512)
    seen = {shape: (batch, SHAPES[shape](**size)) for shape in args.shape or SHAPES}
    if args.model:
        seen = {name: ((4, 256), compose_config(overrides=[f"model={name}"]).model) for name in args.model}
    rounds = 2 if args.quick else args.rounds

    report: dict[str, Any] = {
        "what": "tokens per CPU second of one training step: forward, backward, AdamW, gradient zeroing",
        "quick": args.quick,
        "commit": commit("../automoe", "*.py"),
        "cpu": cpu_model(),
        "threads": 1,
        "dtype": "float32",
        "python": platform.python_version(),
        "versions": versions("torch", "transformers", "torchtitan", "nemo-automodel"),
        "gate_tolerance": GATE,
        "absent": {"torchtitan": WHY},
        "models": {},
    }
    for shape, ((rows, seq_len), config) in seen.items():
        model = measure(shape, config, rows, seq_len, rounds)
        report["models"][shape] = model
        print(
            f"\n{shape}: {model['parameters'] / 1e6:.1f} M parameters, {rows} x {seq_len} tokens, gate {model['gate']}"
        )
        for name, reason in model["absent"].items():
            print(f"{name} is absent: {reason}")
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
