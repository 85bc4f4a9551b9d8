"""Exponential moving average (EMA) of the weights, kept in the optimizer state with the moments.

Every optimizer step that is not skipped sets ``average = decay * average + (1 - decay) * weight``;
the average starts at the initial weights, as in ``torch.optim.swa_utils``. The average of a shard
is a shard of the average, so this module needs no communication, and the code that saves, loads and
reshards moments also handles averages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from automoe.comm.local_shard import local_shard

KEY = "ema"  # This key holds the average in the optimizer's state of a parameter.


def first_average(parameter: Tensor) -> Tensor:
    """Return the initial average of ``parameter``: a copy in the same layout, at least float32.

    In bfloat16 an average would never change, since updates are below half a unit in the last
    place.
    """
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(parameter.detach())


@torch.no_grad()
def update_averages(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Set each exponential average in the optimizer's state to decay * average + (1 - decay) * weight."""
    average = get_ema_multi_avg_fn(decay)
    pairs = list(_pairs(optimizer))
    alike = [(ema, weight) for ema, weight in pairs if ema.dtype == weight.dtype]
    if alike:
        average(*map(list, zip(*alike, strict=True)), None)
    for ema, weight in pairs:
        # Weights are widened one by one: all at once would be another copy of the model.
        if ema.dtype != weight.dtype:
            average([ema], [weight.to(ema.dtype)], None)


@torch.no_grad()
def take_averages(optimizer: torch.optim.Optimizer) -> None:
    """Overwrite every parameter of the optimizer that has an exponential average with this average."""
    for ema, weight in _pairs(optimizer):
        weight.copy_(ema)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace parameters by their averages inside the context; restore them bit for bit on exit.

    The context holds a copy of this rank's trained parameters. Callers enter it when no gradients
    are allocated.
    """
    weights = [weight.clone() for _, weight in _pairs(optimizer)]
    take_averages(optimizer)
    try:
        yield
    finally:
        with torch.no_grad():
            for (_, weight), weight_before in zip(_pairs(optimizer), weights, strict=True):
                weight.copy_(weight_before)


def _pairs(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's shards (exponential average, parameter), in the order of the parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (ema := optimizer.state[parameter].get(KEY)) is not None:
                yield local_shard(ema), local_shard(parameter.detach())
