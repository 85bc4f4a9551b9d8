"""What the parts of a step cost: attention, experts, router and so on, forward and backward, from one profile.

While profiled, every module of interest runs in a range of its own. An operator belongs to the innermost
range around it; in the backward pass, where there are no modules, to the range of the operator that autograd
numbered alike on the way forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

RANGE = "part: "
_BY_PHASE = {
    "grad_norm": "gradient norm",
    "optimizer_step": "optimizer",
}  # of automoe's step (automoe/storage/trace.py)
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
