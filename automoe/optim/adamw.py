"""AdamW and Muon over parameters on several device meshes, and their learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, pi
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.config.schema import Config, OptimConfig
from automoe.config.train_schema import Phase
from automoe.model.params import find_spec
from automoe.optim import muon
from automoe.optim.ema import KEY, first_average
from automoe.optim.stochastic import StochasticAdamW


def build_optimizer(
    model_parts: Iterable[nn.Module],
    optim: OptimConfig,
    seed: int = 0,
    ranks: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """Build AdamW (arXiv 1711.05101) with one parameter group per device mesh and weight decay.

    With ``optim.algorithm=muon``, matrices of the layers are in groups of their own, which Muon
    updates (``automoe.optim.muon``); the call is then collective.

    A multi-tensor (``foreach``) update is one operation over a whole group, and DTensor refuses to
    mix meshes in one operation. Experts and all other parameters are therefore in different groups.
    ``automoe.model.params`` lists which parameters decay; a parameter that a recipe adds to the
    model decays if it has two dims or more. Groups and their parameters follow the order of
    ``named_parameters`` over the parts, so every rank that holds the same parameters builds the
    same groups. Parameters that do not require gradients are left out. A parameter that two parts
    or names share is updated once.

    The state of every parameter is allocated here, as zeros, so the first checkpoint has the same
    tensors as every later one. With ``optim.ema_decay`` the state includes the parameter's average
    (``automoe.optim.ema``). Each group carries ``names``, the global names of its parameters, and
    ``mesh``, the mesh axes of its parameters as text for logs.

    Args:
        model_parts: the parts of the model on this rank, such as its pipeline stages.
        optim: the ``optim`` section of the configuration.
        seed: seed of stochastic rounding (``optim.master_weights=stochastic`` and
            ``optim.moments=bfloat16``).
        ranks: group of the stage's ranks (``Meshes.stage_group``), which share Muon's work; None
            if this rank holds every parameter whole.
    """
    groups: dict[tuple[object, bool, bool], dict[str, Any]] = {}
    seen: set[int] = set()
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            spec = find_spec(name)
            decays = parameter.dim() > 1 if spec is None else spec.decays
            by_muon = optim.algorithm == "muon" and spec is not None and spec.orthogonalized
            key = mesh, decays, by_muon
            if key not in groups:
                groups[key] = {
                    "params": [],
                    "names": [],
                    "weight_decay": optim.weight_decay if decays else 0.0,
                    "mesh": " x ".join(mesh.mesh_dim_names or ("unnamed",))
                    if mesh is not None
                    else "local",
                }
                if by_muon:
                    groups[key] |= {"muon": True, "momentum": optim.momentum}
            groups[key]["params"].append(parameter)
            groups[key]["names"].append(name)
    # A pipeline stage may have no trainable parameters.
    param_groups = list(groups.values()) or [{"params": [], "names": [], "mesh": "local"}]
    options: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps)
    narrow_moments = optim.moments == "bfloat16"
    stochastic = optim.master_weights == "stochastic" or narrow_moments
    optimizer: torch.optim.Optimizer
    if stochastic:
        optimizer = StochasticAdamW(param_groups, **options, seed=seed)
    elif optim.algorithm == "muon":
        narrow = torch.bfloat16 if optim.muon_dtype == "bfloat16" else None
        optimizer = muon.Muon(param_groups, narrow, ranks, **options, fused=True)
    else:
        optimizer = torch.optim.AdamW(param_groups, **options, fused=True)
    for group in param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            dtype = (
                torch.promote_types(parameter.dtype, torch.float32)
                if stochastic
                else parameter.dtype
            )
            # A router's weights are kept wide, so its moments are, too.
            if narrow_moments and ".router." not in name:
                dtype = torch.bfloat16
            if group.get("muon"):
                optimizer.state[parameter] = {muon.KEY: torch.zeros_like(parameter, dtype=dtype)}
            else:
                optimizer.state[parameter] = {  # This is the layout of torch's fused AdamW.
                    # The counter is on the parameter's device, so the host never waits for it.
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, dtype=dtype),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
                }
            if optim.ema_decay:
                optimizer.state[parameter][KEY] = first_average(parameter)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group to ``lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0, of ``total_steps``.

    The first ``warmup_steps`` steps rise linearly and never start from zero: step 0 uses ``lr /
    warmup_steps`` and step ``warmup_steps - 1`` uses ``lr``. After the warm-up:

    - ``constant``: ``lr``.
    - ``cosine``: half a cosine from ``lr`` down to ``min_lr_ratio * lr``, which the last step uses.
    - ``wsd``: ``lr`` until the last ``decay_steps`` steps, which descend linearly to
      ``min_lr_ratio * lr`` (warm-up, stable, decay: arXiv 2404.06395).
    - ``phases``: each phase of ``optim.phases`` goes from the last learning rate of the previous
      phase to its own, which its last step uses.

    If the warm-up is longer than the run, the run ends within the warm-up and has no decay.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    lowest = optim.lr * optim.min_lr_ratio
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "cosine":
        peak = max(optim.warmup_steps - 1, 0)  # This step uses lr.
        done = min(1.0, (step - peak) / max(total_steps - 1 - peak, 1))
        return lowest + (optim.lr - lowest) * (1 + cos(pi * done)) / 2
    if optim.schedule == "wsd":
        decay_steps = min(optim.decay_steps, total_steps - optim.warmup_steps)
        into_decay = step - (total_steps - decay_steps) + 1  # It is 1 on the decay's first step.
        if into_decay <= 0 or decay_steps <= 0:
            return optim.lr
        return optim.lr - (optim.lr - lowest) * min(1.0, into_decay / decay_steps)
    if optim.schedule == "phases":
        phase, before, done = phase_at(optim, step)
        share = {"constant": 1.0, "linear": done, "cosine": (1 - cos(pi * done)) / 2}[phase.decay]
        return optim.lr * (before + (phase.lr_ratio - before) * share)
    # The configuration was validated before, so no other schedule arrives here.
    raise AssertionError(f"unknown schedule {optim.schedule}")


def phase_at(optim: OptimConfig, step: int) -> tuple[Phase, float, float]:
    """Return the phase of a step after the warm-up, the ``lr_ratio`` before it, and the share done.

    The share of a phase of N steps is 1/N after its first step and 1 after its last. Steps past the
    last phase count as its last step.
    """
    before, first = 1.0, optim.warmup_steps
    for phase in optim.phases[:-1]:
        if step < first + phase.steps:
            break
        before, first = phase.lr_ratio, first + phase.steps
    else:
        phase = optim.phases[-1]
    return phase, before, min(1.0, (step - first + 1) / phase.steps)


def bias_update_rate(config: Config, step: int) -> float:
    """Return the rate at which step ``step`` moves the routers' biases.

    It is ``bias_update_rate`` of the step's phase, else (and in the warm-up) that of ``moe``.
    """
    return _of_phase(config, step, "bias_update_rate", config.moe.bias_update_rate)


def mtp_loss_weight(config: Config, step: int) -> float:
    """Return the weight of the loss of the modules for multi-token prediction in step ``step``.

    It is ``mtp_loss_weight`` of the step's phase, else (and in the warm-up) that of ``train``.
    """
    return _of_phase(config, step, "mtp_loss_weight", config.train.mtp_loss_weight)


def _of_phase(config: Config, step: int, key: str, otherwise: float) -> float:
    value = None
    if config.optim.schedule == "phases" and step >= config.optim.warmup_steps:
        value = getattr(phase_at(config.optim, step)[0], key)
    return otherwise if value is None else value
