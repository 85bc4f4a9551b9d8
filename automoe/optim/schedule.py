"""Schedules over the steps of a run: learning rate, expert bias rate, weight of the MTP loss."""

from __future__ import annotations

from math import cos, pi

import torch

from automoe.config.schema import Config, OptimConfig
from automoe.config.train_schema import Phase


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
    - ``phases``: each phase of ``optim.phases`` goes from the last learning rate of the previous one
      (at first ``lr``) to ``lr_ratio * lr``, which its last step uses, by its ``decay``: linear,
      cosine, or constant, at ``lr_ratio * lr`` from its first step.

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
    """Return the phase of ``optim.phases`` that a step is in, and how far the step is in it.

    ``step`` counts from 0, the warm-up included; ``optim.phases`` begin after the warm-up. Steps
    past the last phase count as its last step.

    Returns:
        The phase; the ``lr_ratio`` that the previous phase ends with; the share of the phase that
        is done after the step: 1/N after the first of N steps, 1 after the last.
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
    """Return the rate at which optimizer step ``step``, from 0, moves the routers' expert biases.

    It is ``bias_update_rate`` of the step's phase, else (and in the warm-up) that of ``moe``.
    """
    return _of_phase(config, step, "bias_update_rate", config.moe.bias_update_rate)


def mtp_loss_weight(config: Config, step: int) -> float:
    """Return the weight of the mean loss of the modules for multi-token prediction.

    ``step`` is the optimizer step, counted from 0. The weight is ``mtp_loss_weight`` of the step's
    phase, else (and in the warm-up) that of ``train``.
    """
    return _of_phase(config, step, "mtp_loss_weight", config.train.mtp_loss_weight)


def _of_phase(config: Config, step: int, key: str, otherwise: float) -> float:
    value = None
    if config.optim.schedule == "phases" and step >= config.optim.warmup_steps:
        value = getattr(phase_at(config.optim, step)[0], key)
    return otherwise if value is None else value
