"""AdamW over parameters that live on different meshes, and its learning rate as a pure function of
the step."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, pi
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.config.schema import OptimConfig
from automoe.model.params import find_spec
from automoe.optim.ema import KEY, first_average
from automoe.optim.stochastic import StochasticAdamW


def build_optimizer(
    model_parts: Iterable[nn.Module], optim: OptimConfig, seed: int = 0
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with one parameter group per device mesh and weight decay.

    A multi-tensor (``foreach``) update is one operation over a whole group, and DTensor refuses to
    mix meshes in an operation: experts and everything else are in different groups.
    ``automoe.model.params`` says which parameters decay; one that a recipe adds to the model decays
    if it has two dims or more. Groups and their parameters are in the order of ``named_parameters``
    over the parts, so every rank that holds the same parameters builds the same groups. Parameters
    that do not require gradients are left out, and a parameter that two parts or names share is
    updated once.

    Every parameter has its state, zeros, from the beginning, so the first checkpoint has the same
    tensors as every later one. With ``optim.ema_decay`` so has its average (``automoe.optim.ema``).
    Each group carries ``mesh``, the axes its parameters are sharded over, as text for logs, and
    ``names``.

    Args:
        seed: of the roundings of ``optim.master_weights=stochastic`` and
            ``optim.moments=bfloat16``.
    """
    groups: dict[tuple[object, bool], dict[str, Any]] = {}
    seen: set[int] = set()
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            spec = find_spec(name)
            decays = parameter.dim() > 1 if spec is None else spec.decays
            if (mesh, decays) not in groups:
                groups[mesh, decays] = {
                    "params": [],
                    "names": [],
                    "weight_decay": optim.weight_decay if decays else 0.0,
                    "mesh": " x ".join(mesh.mesh_dim_names or ("unnamed",))
                    if mesh is not None
                    else "local",
                }
            groups[mesh, decays]["params"].append(parameter)
            groups[mesh, decays]["names"].append(name)
    # A stage may be without parameters.
    given = list(groups.values()) or [{"params": [], "names": [], "mesh": "local"}]
    options: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps)
    narrow_moments = optim.moments == "bfloat16"
    stochastic = optim.master_weights == "stochastic" or narrow_moments
    optimizer: torch.optim.Optimizer
    if stochastic:
        optimizer = StochasticAdamW(given, **options, seed=seed)
    else:
        optimizer = torch.optim.AdamW(given, **options, fused=True)
    for group in given:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            dtype = (
                torch.promote_types(parameter.dtype, torch.float32)
                if stochastic
                else parameter.dtype
            )
            if narrow_moments and ".router." not in name:  # whose weights are wide, too
                dtype = torch.bfloat16
            optimizer.state[parameter] = {  # as a fused AdamW lays it out
                # On the parameter's device, so that nobody waits for it.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, dtype=dtype),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
            }
            if optim.ema_decay:
                optimizer.state[parameter][KEY] = first_average(parameter)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step``, counted from 0, of ``total_steps``.

    The first ``warmup_steps`` steps climb in a line, never from zero: step 0 takes ``lr /
    warmup_steps`` and step ``warmup_steps - 1`` takes ``lr``. After that:

    - ``constant``: ``lr``.
    - ``cosine``: half a cosine from ``lr`` to ``min_lr_ratio * lr``, which the last step takes.
    - ``wsd``: ``lr`` until the last ``decay_steps`` steps, which descend in a line to
      ``min_lr_ratio * lr`` (warm-up, stable, decay: arXiv 2404.06395).

    A warm-up that does not end before the run does leaves no room for the decay and is simply cut
    off.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    lowest = optim.lr * optim.min_lr_ratio
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "cosine":
        peak = max(optim.warmup_steps - 1, 0)  # the step that takes lr
        done = min(1.0, (step - peak) / max(total_steps - 1 - peak, 1))
        return lowest + (optim.lr - lowest) * (1 + cos(pi * done)) / 2
    if optim.schedule == "wsd":
        decay_steps = min(optim.decay_steps, total_steps - optim.warmup_steps)
        into_decay = step - (total_steps - decay_steps) + 1  # 1 on the first step of the decay
        if into_decay <= 0 or decay_steps <= 0:
            return optim.lr
        return optim.lr - (optim.lr - lowest) * min(1.0, into_decay / decay_steps)
    # the configuration is validated before
    raise AssertionError(f"unknown schedule {optim.schedule}")
