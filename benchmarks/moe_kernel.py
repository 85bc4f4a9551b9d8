"""How fast one MoE layer runs forward and backward on one GPU, compared with every implementation that is there.

Ceilings come first: a dense product of the layer's size and of 8192 cubed, and a copy. Then, for each model's
layer and each routing, every peer must equal a float32 computation within bfloat16's bounds, with its memory
poisoned beforehand; only then peers are timed, in turns. One that fails or differs is told and costs the others nothing. FLOPs are the model's own, 18 T K H I for both passes.

    python benchmarks/moe_kernel.py            # on a GPU, 9 minutes: writes benchmarks/results/moe_kernel.json and .png
    python benchmarks/moe_kernel.py --quick    # anywhere, seconds: small layers, to check the script itself
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import measuring  # noqa: F401  (puts the checkout on the path)
import torch
from kernel_peers import MUST_RUN, NOT_A_LAYER, PEERS, Absent, Layer, Shape
from measuring import PEAK, commit, result_file, seconds

from automoe.moe.router import gate_ids
from automoe.observe.environment import describe_environment
from tests.support.host_syncs import host_syncs

TOLERANCE = 2e-2  # relative to float32, of the output and of every gradient
SHAPES = {
    "Qwen3-30B-A3B, 8k tokens": Shape(8192, 2048, 768, 128, 8),
    "Qwen3-30B-A3B, 32k tokens": Shape(32768, 2048, 768, 128, 8),
    "Moonlight-16B-A3B, 16k tokens": Shape(16384, 2048, 1408, 64, 6),
    "DeepSeek-V3, EP8 slice, 4k tokens": Shape(4096, 7168, 2048, 32, 8),
    "DeepSeek-V3, whole layer, 8k tokens": Shape(8192, 7168, 2048, 256, 8),
    "Mixtral-8x7B, 8k tokens": Shape(8192, 4096, 14336, 8, 2),
}
QUICK = {"small": Shape(64, 64, 32, 8, 2), "odd": Shape(49, 40, 24, 5, 3)}
ROUTINGS = ("balanced", "zipf", "empty")


class Inputs:
    """Leaves of one layer and the gradient from above; ``weights`` are softmax probabilities, as a router gives."""

    NAMES = ("x", "weights", "gate_up_proj", "down_proj")

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

        t, h, i, e = shape.tokens, shape.hidden, shape.width, shape.experts
        self.x = normal(t, h).requires_grad_()
        weights = torch.rand(t, shape.top_k, generator=generator, device=device)
        self.weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
        self.gate_up_proj = normal(e, 2, i, h, scale=h**-0.5).requires_grad_()
        self.down_proj = normal(e, h, i, scale=i**-0.5).requires_grad_()
        self.grad = normal(t, h)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.NAMES]

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def choices(routing: str, shape: Shape, device: torch.device) -> torch.Tensor:
    """Experts [T, K] of one row of T tokens."""
    index = torch.arange(shape.tokens, device=device).unsqueeze(0)
    return gate_ids(routing, index, shape.experts, shape.top_k)[0]


@torch.no_grad()
def differences(inputs: Inputs, ids: torch.Tensor, out: torch.Tensor) -> dict[str, float]:
    """Relative error of ``out`` and of the leaves' gradients against float32, an expert at a time."""
    x, grad = inputs.x.float(), inputs.grad.float()
    expected = {"out": torch.zeros_like(x), "x": torch.zeros_like(x), "weights": torch.zeros_like(inputs.weights)}
    errors = {"gate_up_proj": [0.0, 0.0], "down_proj": [0.0, 0.0]}

    def note(name: str, expert: int, value: torch.Tensor) -> None:
        gradient = getattr(inputs, name).grad[expert].float()
        errors[name][0] += float((gradient - value).square().sum())
        errors[name][1] += float(value.square().sum())

    for expert in range(inputs.down_proj.shape[0]):
        token, choice = torch.where(ids == expert)
        gate_up, down = inputs.gate_up_proj[expert].float().flatten(0, 1), inputs.down_proj[expert].float()
        rows, weight = x[token], inputs.weights[token, choice, None]
        gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        act = gate * sigmoid * up
        expected["out"].index_add_(0, token, (act @ down.T) * weight)
        grad_act = grad[token] @ down
        expected["weights"][token, choice] = (grad_act * act).sum(1)
        note("down_proj", expert, grad[token].T @ (act * weight))
        grad_act *= weight
        both = torch.cat((grad_act * up * sigmoid * (1 + gate * (1 - sigmoid)), grad_act * gate * sigmoid), dim=1)
        note("gate_up_proj", expert, (both.T @ rows).view_as(inputs.gate_up_proj[expert]))
        expected["x"].index_add_(0, token, both @ gate_up)
    result = {name: (square / norm) ** 0.5 if norm else float("nan") for name, (square, norm) in errors.items()}
    for name, value in expected.items():
        got = out if name == "out" else getattr(inputs, name).grad
        result[name] = float((got.float() - value).norm() / value.norm())
    return result


def poison(device: torch.device) -> None:
    """Fill memory that is about to be handed out again with NaN: what a peer forgets to write will show."""
    size = (torch.cuda.mem_get_info()[0] // 8 if device.type == "cuda" else 1 << 24) // 2
    torch.full((size,), torch.nan, dtype=torch.bfloat16, device=device)


def saved_bytes(layer: Layer, inputs: Inputs) -> int:
    """What a forward pass keeps for the backward besides the weights, the tokens themselves included."""
    weights = {inputs.gate_up_proj.untyped_storage().data_ptr(), inputs.down_proj.untyped_storage().data_ptr()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(*inputs.leaves)
    return sum(kept.values())


def rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Median amount a second over ten runs after three."""
    for _ in range(3):
        work()
    return amount / median(seconds(work, device) for _ in range(10))


def ceilings(shapes: dict[str, Shape], device: torch.device, edge: int) -> dict[str, Any]:
    """Dense products in FLOP/s and a copy in bytes/s, on random numbers."""

    def rate_of(m: int, k: int, n: int) -> float:
        a, b = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((m, k), (k, n)))
        return rate(lambda: a @ b, 2.0 * m * k * n, device)

    source = torch.randn(edge * edge, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return {
        "cube": rate_of(edge, edge, edge),
        "copy_bytes": rate(lambda: target.copy_(source), 2.0 * source.nbytes, device),
        "layer": {name: rate_of(s.tokens * s.top_k, s.hidden, 2 * s.width) for name, s in shapes.items()},
    }


class Differs(Exception):
    """A peer that computes something else."""


def not_timed(name: str, error: Exception) -> dict[str, Any]:
    """What is said of a peer that ``error`` stopped; ``failed`` where the whole benchmark then has to."""
    expected = isinstance(error, Absent | torch.OutOfMemoryError)
    failed = isinstance(error, Differs) or (name in MUST_RUN and not expected)
    what = "" if isinstance(error, Absent | Differs) else f"{type(error).__name__}: "
    return {"absent": what + (str(error).splitlines() or [""])[0], "failed": failed}


def failures(report: dict[str, Any]) -> list[str]:
    """Every peer that is wrong, and every one of ours that does not run, and why."""
    return [
        f"{name}, {routing}: {peer}: {facts['absent']}"
        for name, routings in report["layers"].items()
        for routing, peers in routings.items()
        for peer, facts in peers.items()
        if facts.get("failed")
    ]


def measure(
    shape: Shape,
    routing: str,
    peers: dict[str, Callable[[Shape, torch.Tensor], Layer]],
    device: torch.device,
    budget_s: float,
    spoil: str,
) -> dict[str, dict[str, Any]]:
    """Every one of ``peers`` on one layer and routing: checked, then timed in turns until the budget is spent."""
    inputs, ids = Inputs(shape, device), choices(routing, shape, device)
    results: dict[str, dict[str, Any]] = {}
    layers: dict[str, Layer] = {}
    for name, build in peers.items():
        try:
            layer = build(shape, ids)
            poison(device)
            inputs.clear()
            out = layer(*inputs.leaves)
            out.backward(inputs.grad if name != NOT_A_LAYER else torch.ones_like(out))
            facts: dict[str, Any] = {}
            if name != NOT_A_LAYER:
                if name == spoil:
                    out = out * 1.1
                facts["differences"] = differences(inputs, ids, out.detach())
                wrong = {part: d for part, d in facts["differences"].items() if not d <= TOLERANCE}
                if wrong:
                    raise Differs(f"differs from float32 by {wrong}, over {TOLERANCE}")
                facts["saved_bytes_a_token"] = saved_bytes(layer, inputs) / shape.tokens
                waits = host_syncs(lambda run=layer: run(*inputs.leaves), device)
                facts["host_syncs"] = None if waits is None else sum(waits.values())
                facts["peak_bytes"] = peak_bytes(layer, inputs, device)
            results[name], layers[name] = facts, layer
        except Exception as error:  # foreign packages fail in many ways where a machine is not to their liking
            results[name] = not_timed(name, error)
        inputs.clear()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    end, rounds = time.monotonic() + budget_s, 0
    while layers and (rounds < 2 or time.monotonic() < end):
        for name, layer in list(layers.items()):
            try:
                times[name].append(passes(layer, inputs, device))
            except Exception as error:  # the others are still timed
                results[name] = not_timed(name, error)
                del layers[name], times[name]
        rounds += 1
    for name, rows in times.items():
        forward, both = (median(column) for column in zip(*rows, strict=True))
        results[name] |= {
            "forward_seconds": forward,
            "both_seconds": both,
            "forward_tflops": shape.flops / forward / 1e12,
            "backward_tflops": 2 * shape.flops / max(both - forward, 1e-12) / 1e12,
            "tflops": 3 * shape.flops / both / 1e12,
            "rounds": rows,
        }
    return results


def peak_bytes(layer: Layer, inputs: Inputs, device: torch.device) -> int | None:
    """High-water mark of both passes above inputs, outputs of the backward included; None off the GPU."""
    inputs.clear()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(*inputs.leaves).backward(inputs.grad)
    return torch.cuda.max_memory_allocated() - before


def passes(layer: Layer, inputs: Inputs, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward pass, and of a forward with its backward."""
    inputs.clear()
    kept: list[torch.Tensor] = []
    forward = seconds(lambda: kept.append(layer(*inputs.leaves)), device)
    out = kept.pop()
    grad = inputs.grad if out.shape == inputs.grad.shape else torch.ones_like(out)
    return forward, forward + seconds(lambda: out.backward(grad), device)


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of both passes' TFLOPS: a group a layer, balanced routing, the dense ceiling as a line."""
    import matplotlib

    from automoe.observe.plot_style import CELLS, INK, MUTED, RC, new_figure, save

    layers = report["layers"]
    with matplotlib.rc_context(RC):
        figure, (axis,) = new_figure(11, 4.8)
        colours = zip(PEERS, [*CELLS, MUTED], strict=True)
        timed = [
            pair for pair in colours if any("tflops" in layer["balanced"].get(pair[0], {}) for layer in layers.values())
        ]
        wide = 0.8 / max(len(timed), 1)
        for place, (peer, colour) in enumerate(timed):
            bars = [layer["balanced"].get(peer, {}).get("tflops", 0.0) for layer in layers.values()]
            axis.bar([n + place * wide for n in range(len(bars))], bars, wide, label=peer, color=colour)
        for n, name in enumerate(layers):
            ceiling = report["ceilings"]["layer"][name] / 1e12
            axis.plot([n - wide, n + 0.8], [ceiling, ceiling], color=INK, linewidth=1)
        axis.set_xticks([n + 0.35 for n in range(len(layers))], [name.replace(", ", "\n") for name in layers])
        axis.set_ylabel("TFLOPS, forward and backward")
        axis.set_title("One MoE layer, balanced routing; lines: a dense product of the layer's size")
        figure.legend(loc="outside lower center", ncols=4)
        save(figure, path)


def print_table(report: dict[str, Any]) -> None:
    """The numbers that matter, last on the screen."""
    print(f"{'':62}{'TFLOPS':>8}{'of dense':>10}{'of peak':>9}{'saved/ideal':>13}{'syncs':>7}")
    for name, routings in report["layers"].items():
        shape = report["shapes"][name]
        for routing, peers in routings.items():
            for peer, facts in peers.items():
                title = f"{name}, {routing}: {peer}"
                if "absent" in facts:
                    if "not reached" not in facts["absent"]:
                        print(f"{title:62}  not run: {facts['absent'][:60]}")
                    continue
                tflops = facts["tflops"]
                saved = facts.get("saved_bytes_a_token")
                print(
                    f"{title:62}{tflops:8.2f}{tflops * 1e12 / report['ceilings']['layer'][name]:10.2f}"
                    f"{tflops * 1e12 / PEAK:9.1%}"
                    + (f"{saved / shape['ideal_saved_bytes']:13.2f}" if saved else f"{'':13}")
                    + f"{facts.get('host_syncs')!s:>7}"
                )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small layers, on the CPU where there is no GPU")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all timings together")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results; the temporary folder with --quick")
    parser.add_argument("--layer", action="append", help="only this one (--quick has others); may be repeated")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only this one; may be repeated")
    parser.add_argument("--spoil", default="", help="make this peer wrong, to see the gate close")
    args = parser.parse_args()
    out = result_file(args.out, "moe_kernel", args.quick)
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --quick checks the script itself without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = QUICK if args.quick else SHAPES
    if unknown := sorted(set(args.layer or ()) - known.keys()):
        raise SystemExit(f"no such layer: {'; '.join(unknown)}. There are: {'; '.join(known)}")
    shapes = {name: shape for name, shape in known.items() if name in (args.layer or known)}
    peers = {name: build for name, build in PEERS.items() if name in (args.peer or PEERS)}
    budget = 0.0 if args.quick else args.seconds / len(shapes) / len(ROUTINGS) / 2  # gates take the other half
    end = time.monotonic() + (args.seconds if not args.quick else float("inf"))
    report: dict[str, Any] = {
        "commit": commit("../automoe/moe", "kernel_peers.py", "measuring.py", "moe_kernel.py"),
        "environment": describe_environment(),
        "quick": args.quick,
        "device": device.type,
        "tolerance": TOLERANCE,
        "shapes": {
            name: vars(shape) | {"flops": shape.flops, "ideal_saved_bytes": shape.ideal_saved_bytes}
            for name, shape in shapes.items()
        },
        "ceilings": ceilings(shapes, device, 256 if args.quick else 8192),
        "layers": {},
    }
    for (name, shape), routing in product(shapes.items(), ROUTINGS):
        found = report["layers"].setdefault(name, {})
        if time.monotonic() > end:
            found[routing] = {peer: {"absent": "not reached within --seconds"} for peer in peers}
        else:
            try:
                found[routing] = measure(shape, routing, peers, device, budget, args.spoil)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            except Exception as error:  # a kernel that reads what is not there costs the process its GPU
                found[routing] = {peer: not_timed(peer, error) for peer in peers}
        out.write_text(json.dumps(report, indent=1) + "\n")  # what is measured is kept, whatever comes next
    try:
        draw(report, out.with_suffix(".png"))
    except Exception as error:  # no plot costs no table
        print(f"no plot: {type(error).__name__}: {error}")
    print_table(report)
    if failed := failures(report):
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
