"""An exponential moving average of the weights, kept in the optimizer's state beside the moments.

``average = decay * average + (1 - decay) * weight`` after every step that is taken, beginning with
the first weights, as ``torch.optim.swa_utils`` has it. A shard's average is a shard of the average:
nothing here talks to other ranks, and what saves, loads and reshards moments does the same for
averages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from automoe.moe.local_shard import local_shard

KEY = "ema"  # in the optimizer's state of a parameter


def first_average(parameter: torch.Tensor) -> torch.Tensor:
    """The average that ``parameter`` begins with, laid out like it, in at least float32: bfloat16
    would not move."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(parameter.detach())


@torch.no_grad()
def update_averages(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Move every average towards its parameter, in place."""
    average = get_ema_multi_avg_fn(decay)
    pairs = list(_pairs(optimizer))
    alike = [(ema, weight) for ema, weight in pairs if ema.dtype == weight.dtype]
    if alike:
        average(*map(list, zip(*alike, strict=True)), None)
    for ema, weight in pairs:
        # widened one by one: all at once would be another copy of the model
        if ema.dtype != weight.dtype:
            average([ema], [weight.to(ema.dtype)], None)


@torch.no_grad()
def take_averages(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the value of its average, for good."""
    for ema, weight in _pairs(optimizer):
        weight.copy_(ema)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Parameters have the values of their averages inside, and their own again, to the bit, after
    it.

    Costs a copy of this rank's trained parameters, at a moment at which there are no gradients.
    """
    own = [weight.clone() for _, weight in _pairs(optimizer)]
    take_averages(optimizer)
    try:
        yield
    finally:
        with torch.no_grad():
            for (_, weight), kept in zip(_pairs(optimizer), own, strict=True):
                weight.copy_(kept)


def _pairs(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's shards of each average and of its parameter, in the order of the parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (ema := optimizer.state[parameter].get(KEY)) is not None:
                yield local_shard(ema), local_shard(parameter.detach())
