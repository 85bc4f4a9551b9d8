"""How fast whole training steps run on one GPU, compared with other model code in the same step.

A step is automoe's own: inputs, forward and backward over micro-batches, statistics, gradient norm, AdamW. Of each
model as many layers are taken as fit, by the plan; every contender starts from the same weights. First all of
them must agree on the loss and the gradients of a step; only then they are timed, in turns, each alone on the
device. MFU is given in the two conventions of ``automoe.model.params``.

    python benchmarks/train_step.py            # on a GPU, 9 minutes: writes benchmarks/results/train_step.json and .png
    python benchmarks/train_step.py --quick    # anywhere, seconds: small models, to check the script itself
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import measuring  # noqa: F401  (puts the checkout on the path)
import torch
from kernel_peers import Absent
from measuring import PEAK, commit, result_file, seconds
from step_trainers import CONTENDERS, GATES, Case, Trainer, build_trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.model.params import count_params
from automoe.observe.environment import describe_environment
from automoe.observe.flops import train_flops_per_token
from automoe.parallel.mesh import Meshes, build_meshes
from tests.support.gpu import conf_model, one_rank
from tests.support.host_syncs import host_syncs

LOSS_TOLERANCE = 1e-3  # relative to our grouped_mm contender's
GRADIENT_TOLERANCE = 5e-2  # likewise, of a sample of each gradient; bfloat16 leaves about half of it
REFERENCE = "automoe grouped_mm"
RANGE = "part: "
# Parts of a step: while profiled, every module of interest runs in a range of its own. An operator belongs to the innermost
# range around it; in the backward pass, where there are no modules, to the range of the operator that autograd numbered
# alike on the way forward.
_BY_PHASE = {"grad_norm": "gradient norm", "optimizer_step": "optimizer"}  # of automoe's step (automoe/passes/trace.py)
PARTS = (
    "attention",
    "experts",
    "dispatch",
    "router",
    "shared experts",
    "dense ffn",
    "norms",
    "cross-entropy",
    "gradient norm",
    "optimizer",
    "weights and gradients",  # FSDP's: copies of weights in bfloat16, of gradients in float32
    "other",
)
_BY_NAME = {
    "": "cross-entropy",  # what the model itself does outside of its modules
    "self_attn": "attention",
    "linear_attn": "attention",
    "experts": "experts",
    "inner_experts": "experts",
    "shared_experts": "shared experts",
    "router": "router",
    "gate": "router",
    "embed_tokens": "other",
    "lm_head": "cross-entropy",
}


def cases() -> dict[str, Case]:
    """A dense and three MoE layers of DeepSeek-V3 with a quarter of its experts; the others as deep as they fit."""
    dsv3 = replace(conf_model("dsv3_671b"), first_k_dense=1, num_experts=64)
    qwen3, moonlight = conf_model("qwen3_30b_a3b"), conf_model("moonlight_16b_a3b")
    return {
        "DeepSeek-V3 slice": Case(dsv3, layers=4, least=2, least_rows=2),
        "Qwen3-30B-A3B": Case(qwen3, layers=qwen3.num_layers, least=1, least_rows=7),
        "Moonlight-16B-A3B": Case(moonlight, layers=moonlight.num_layers, least=2, least_rows=7),
    }


def quick_cases() -> dict[str, Case]:
    """The small models of both kinds of attention, in one micro-batch and in two."""
    small = dict(layers=2, least_rows=2, seq_len=32)
    return {
        "small DeepSeek-V3": Case(conf_model("small_dsv3"), least=2, rows=2, **small),
        "small Qwen3-MoE": Case(conf_model("small_qwen3_moe"), least=1, rows=4, micro_batches=2, **small),
    }


def memory_bytes(device: torch.device) -> float:
    """Of the GPU; 0 on the CPU, where nothing is cut to fit."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0.0


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def examine(trainer: Trainer, device: torch.device) -> dict[str, Any]:
    """Besides time: memory, waits of the host and seconds by part, of a step that is not the first."""
    facts: dict[str, Any] = {"loss": trainer.step(), "state_bytes": trainer.state_bytes()}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    facts["host_syncs"] = host_syncs(trainer.step, device)
    facts["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    facts["parts"] = seconds_by_part(trainer.step, trainer.part, device)
    return facts


class Differs(Exception):
    """A contender that computes something else."""


def not_timed(name: str, error: Exception) -> dict[str, Any]:
    """What is said of a contender that ``error`` stopped; ``failed`` where the whole benchmark then has to.

    Ours fails by running out of memory too: the plan said that it fits.
    """
    failed = isinstance(error, Differs) or (name.startswith("automoe") and not isinstance(error, Absent))
    what = "" if isinstance(error, Absent | Differs) else f"{type(error).__name__}: "
    return {"absent": what + (str(error).splitlines() or [""])[0], "failed": failed}


def failures(report: dict[str, Any]) -> list[str]:
    """Every contender that differs, every one of ours that does not run, and why; every model without a time."""
    failed = []
    for title, model in report["models"].items():
        contenders = model.get("contenders") or {"every contender": model}
        failed += [f"{title}: {name}: {f['absent']}" for name, f in contenders.items() if f.get("failed")]
        if all("absent" in facts for facts in contenders.values()):
            failed.append(f"{title}: nothing was timed, no contender is left")
    return failed


def gate(
    config: Config, meshes: Meshes, device: torch.device, spoil: str, names: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, dict[str, Any]]]]:
    """Every contender's first step against ours, and what ``examine`` finds; those that cannot run or differ say why."""
    facts: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, dict[str, Any]]] = {routing: {} for routing in GATES}
    expected: tuple[float, dict[str, torch.Tensor]] | None = None
    for name in sorted(names, key=lambda name: name != REFERENCE):
        try:
            trainer = build_trainer(name, config, meshes, device)
            trainer.choose("balanced")  # the same choices, which rounding would not leave learned ones
            loss, gradients = trainer.fingerprint()
            if name == spoil:
                loss *= 1 + 2 * LOSS_TOLERANCE
            expected = expected or (loss, gradients)
            facts[name] = compare((loss, gradients), expected)
            for routing in GATES:
                trainer.choose(routing)
                found[routing][name] = examine(trainer, device)
        except Exception as error:  # foreign packages fail in many ways where a machine is not to their liking
            facts[name] = not_timed(name, error)
            for contenders in found.values():
                contenders.pop(name, None)
        trainer = None
        release(device)
        if expected is None:
            why = f"{REFERENCE}, which all others are compared with, is absent"
            return {other: {"absent": why} for other in names} | facts, found
    return facts, found


def compare(
    got: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Relative differences of a first step's loss and gradients.

    Raises:
        Differs: they are too large.
    """
    (loss, gradients), (reference, references) = got, expected
    assert gradients.keys() == references.keys(), sorted(gradients.keys() ^ references.keys())
    differences = {key: float((gradients[key] - value).norm() / value.norm()) for key, value in references.items()}
    worst = max(differences, key=lambda key: differences[key])
    off = abs(loss - reference) / reference
    if not (off <= LOSS_TOLERANCE and differences[worst] <= GRADIENT_TOLERANCE):
        raise Differs(
            f"the first step's loss differs from that of {REFERENCE} by {off:.1e} ({LOSS_TOLERANCE:.0e} is "
            f"allowed), the gradient of {worst} by {differences[worst]:.1e} ({GRADIENT_TOLERANCE:.0e})"
        )
    return {"loss_difference": off, "worst_gradient": worst, "worst_gradient_difference": differences[worst]}


def measure(
    case: Case,
    compiles: bool,
    meshes: Meshes,
    device: torch.device,
    budget_s: float,
    least_rounds: int,
    steps: int,
    spoil: str,
    names: list[str],
) -> dict[str, Any]:
    """One model: the slice, the gate, then rounds in which every contender steps in turn until time is up."""
    end = time.monotonic() + budget_s
    try:
        config, planned = case.slice_for(memory_bytes(device))
    except Absent as error:
        return {"absent": str(error)}
    loss = "triton" if device.type == "cuda" else "torch"  # of all but transformers
    config = replace(config, train=replace(config.train, compile=compiles), kernels=replace(config.kernels, loss=loss))
    facts, found = gate(config, meshes, device, spoil, names)
    times: dict[str, dict[str, list[float]]] = {routing: {} for routing in GATES}
    rounds = 0
    while any("absent" not in f for f in facts.values()) and (rounds < least_rounds or time.monotonic() < end):
        for name in facts:
            if "absent" in facts[name]:
                continue
            try:
                trainer = build_trainer(name, config, meshes, device)
                for routing in GATES:
                    trainer.choose(routing)
                    trainer.step()
                    seen = times[routing].setdefault(name, [])
                    seen += [seconds(trainer.step, device) for _ in range(steps)]
            except Exception as error:  # the others are still timed
                facts[name] = not_timed(name, error)
                for each in (*times.values(), *found.values()):
                    each.pop(name, None)
            trainer = None
            release(device)
        rounds += 1
    tokens = config.train.global_batch_size * config.train.seq_len
    flops = train_flops_per_token(config.model, config.train.seq_len)
    for routing, contenders in times.items():
        for name, seen in contenders.items():
            rate = tokens / median(seen)
            mfu, mfu_full_attention = flops.mfu(rate, PEAK)
            found[routing][name] |= {
                "tokens_per_second": rate,
                "mfu": mfu,
                "mfu_full_attention": mfu_full_attention,
                "step_seconds": median(seen),
                "step_seconds_all": seen,
            }
    return {
        "layers": config.model.num_layers,
        "of_layers": case.model.num_layers,
        "experts": config.model.num_experts,
        "parameters": count_params(config.model).total,
        "planned_bytes": planned,
        "memory_bytes": memory_bytes(device),
        "rows": config.train.global_batch_size,
        "micro_rows": config.train.micro_batch_size,
        "seq_len": config.train.seq_len,
        "contenders": facts,
        "routings": found,
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of seconds by part, a bar a contender, balanced routing: a plot a model."""
    import matplotlib

    from automoe.observe.plot_style import CELLS, GRID, INK, MUTED, RC, new_figure, save

    colours = dict(zip(PARTS, (*CELLS, GRID, MUTED, INK, "#8aa0b5"), strict=True))
    models = report["models"]
    with matplotlib.rc_context(RC):
        figure, axes = new_figure(4.4 * len(models), 4.8, columns=len(models))
        for axis, (title, model) in zip(axes, models.items(), strict=True):
            axis.set_title(title)
            if "absent" in model:
                axis.axis("off")
                axis.text(0.5, 0.5, model["absent"], color=MUTED, ha="center")
                continue
            contenders = model["routings"]["balanced"]
            bottoms = [0.0] * len(contenders)
            for part in PARTS:
                heights = [sum(f["parts"][way][part] for way in f["parts"]) for f in contenders.values()]
                axis.bar(range(len(heights)), heights, 0.7, bottoms, label=part, color=colours[part])
                bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
            axis.set_xticks(range(len(contenders)), [name.replace(" ", "\n") for name in contenders])
            axis.set_ylabel("seconds a step, by the profiler")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        save(figure, path)


def print_table(report: dict[str, Any]) -> None:
    """The numbers that matter, last on the screen."""
    columns = f"{'tokens/s':>10}{'MFU':>8}{'full':>8}{'spread':>8}{'peak GiB':>10}{'syncs':>7}"
    for title, model in report["models"].items():
        if "absent" in model:
            print(f"{title}: not run: {model['absent']}")
            continue
        print(
            f"{title}: {model['layers']} of {model['of_layers']} layers, {model['experts']} experts, "
            f"{model['parameters'] / 1e9:.2f} B parameters, {model['rows']} x {model['seq_len']} tokens, "
            f"{model['planned_bytes'] / 2**30:.1f} GiB planned of {model['memory_bytes'] / 2**30:.1f}"
        )
        print(f"{'':36}{columns}")
        for name, facts in model["contenders"].items():
            if "absent" in facts:
                print(f"  {name:34}  not run: {facts['absent'][:90]}")
        for routing, contenders in model["routings"].items():
            for name, f in contenders.items():
                spread = (max(f["step_seconds_all"]) - min(f["step_seconds_all"])) / f["step_seconds"]
                waits = None if f["host_syncs"] is None else sum(f["host_syncs"].values())
                peak = "" if f["peak_bytes"] is None else f"{f['peak_bytes'] / 2**30:.1f}"
                print(
                    f"  {f'{name}, {routing}':34}{f['tokens_per_second']:10.0f}{f['mfu']:8.1%}"
                    f"{f['mfu_full_attention']:8.1%}{spread:8.1%}{peak:>10}{waits!s:>7}"
                )


def part_of(name: str, module: nn.Module) -> str | None:
    """The part that ``module``, called ``name`` in one of the contenders' models, is; None: its parent's."""
    if type(module).__name__.endswith("RMSNorm"):
        return "norms"
    last = name.rsplit(".", 1)[-1]
    if last == "mlp":
        routed = any(child.endswith("experts") for child, _ in module.named_modules())
        return "dispatch" if routed else "dense ffn"
    if last == "model" and hasattr(module, "layers"):  # of transformers: all but the head
        return "other"
    return _BY_NAME.get(last)


@contextmanager
def ranges(model: nn.Module) -> Iterator[None]:
    """A range around the forward of every module that is a part."""
    handles, open_ranges = [], []
    for name, module in model.named_modules():
        part = part_of(name, module)
        if part is None:
            continue

        def enter(_module: nn.Module, _inputs: Any, part: str = part) -> None:
            open_ranges.append(record_function(RANGE + part))
            open_ranges[-1].__enter__()

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            open_ranges.pop().__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def seconds_by_part(step: Callable[[], object], model: nn.Module, device: torch.device) -> dict[str, dict[str, float]]:
    """``forward`` and ``backward`` seconds of each part: of kernels on a GPU, of operators on the CPU.

    What comes neither before nor after the loss counts as forward. Kernels on two streams at once count twice.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with ranges(model), profile(activities=activities) as profiler:
        step()
    events = [event for event in profiler.events() if event.device_type.name == "CPU"]
    numbered: dict[int, str] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        part, backward, _ = _place(event)
        # Of operators with one number the last made the node: those before it made none.
        if event.sequence_nr >= 0 and part is not None and not backward:
            numbered[event.sequence_nr] = part
    totals = {direction: Counter(dict.fromkeys(PARTS, 0.0)) for direction in ("forward", "backward")}
    for event in events:
        spent = sum(kernel.duration for kernel in event.kernels) if device.type == "cuda" else event.self_cpu_time_total
        part, backward, number = _place(event)
        part = part or numbered.get(number, "other")
        totals["backward" if backward else "forward"][part] += spent / 1e6
    return {direction: dict(total) for direction, total in totals.items()}


def _place(event: Any) -> tuple[str | None, bool, int]:
    """The part whose range ``event`` lies in, whether in a backward pass, and the autograd number of its node there."""
    part, number = None, -1
    while event is not None:
        if part is None and event.name.startswith(RANGE):
            part = event.name.removeprefix(RANGE)
        if part is None:
            part = _BY_PHASE.get(event.name)
        if part is None and ("FSDP::" in event.name or event.name.endswith("AccumulateGrad")):
            part = "weights and gradients"
        if event.sequence_nr >= 0:
            number = event.sequence_nr  # the outermost's: inside a node what it runs again has numbers of its own
        if event.name.startswith("autograd::engine::evaluate_function"):
            return part, True, number
        event = event.cpu_parent
    return part, False, number


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, on the CPU where there is no GPU")
    parser.add_argument("--model", action="append", help="only this one (--quick has others); may be repeated")
    parser.add_argument(
        "--compile", action="store_true", help="our model and our parts of torchtitan's under train.compile"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="for all models together")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help=f"{REFERENCE} and only this one")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results; the temporary folder with --quick")
    parser.add_argument("--spoil", default="", help="make this contender wrong, to see the gate close")
    args = parser.parse_args()
    out = result_file(args.out, "train_step", args.quick)
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --quick checks the script itself without one")
    known = quick_cases() if args.quick else cases()
    if unknown := sorted(set(args.model or ()) - known.keys()):
        raise SystemExit(f"no such model: {', '.join(unknown)}. There are: {', '.join(known)}")
    chosen = {title: case for title, case in known.items() if title in (args.model or known)}
    names = [name for name in CONTENDERS if name in (args.contender or CONTENDERS) or name == REFERENCE]
    with one_rank("cuda" if torch.cuda.is_available() else "cpu") as device:
        report: dict[str, Any] = {
            "commit": commit("../automoe", "*.py"),
            "environment": describe_environment(),
            "quick": args.quick,
            "device": device.type,
            "compile": args.compile,
            "peak_flops": PEAK,
            "loss_tolerance": LOSS_TOLERANCE,
            "gradient_tolerance": GRADIENT_TOLERANCE,
            "models": {},
        }
        meshes = build_meshes(resolve_mesh(MeshConfig(dp_shard=1), 1), device)
        for title, case in chosen.items():
            budget, rounds, steps = (0.0, 1, 1) if args.quick else (args.seconds / len(chosen), 2, 4)
            try:
                report["models"][title] = measure(
                    case, args.compile, meshes, device, budget, rounds, steps, args.spoil, names
                )
            except Exception as error:  # a kernel that reads what is not there costs the process its GPU
                report["models"][title] = not_timed(REFERENCE, error)
            out.write_text(json.dumps(report, indent=1) + "\n")  # what is measured is kept
    try:
        draw(report, out.with_suffix(".png"))
    except Exception as error:  # no plot costs no table
        print(f"no plot: {type(error).__name__}: {error}")
    print_table(report)
    if failed := failures(report):
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
