"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

from math import cos, pi

from automoe.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step``, counted from 0, of ``total_steps``.

    The first ``warmup_steps`` steps climb in a line, never from zero: step 0 takes ``lr / warmup_steps``
    and step ``warmup_steps - 1`` takes ``lr``. After that:

    - ``constant``: ``lr``.
    - ``cosine``: half a cosine from ``lr`` to ``min_lr_ratio * lr``, which the last step takes.
    - ``wsd``: ``lr`` until the last ``decay_steps`` steps, which descend in a line to
      ``min_lr_ratio * lr`` (warm-up, stable, decay: arXiv 2404.06395).

    A warm-up that does not end before the run does leaves no room for the decay and is simply cut off.
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
    raise AssertionError(f"unknown schedule {optim.schedule}")  # the configuration is validated before
