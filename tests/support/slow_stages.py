"""Pipeline stages that sleep in place of computing: how long the real runtime takes for given times of its actions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from automoe.config.pipeline import pipeline_order, stages_of_ranks
from automoe.interop.torch_pipelining import ordered_schedule
from automoe.parallel.overlap import MERGED_PASSES
from automoe.parallel.pipeline import Stage


class _Sleep(torch.autograd.Function):
    """The identity, whose passes take ``forward`` and ``backward`` seconds."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        time.sleep(forward)
        ctx.seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        time.sleep(ctx.seconds)
        return grad, None, None


class SlowStage(nn.Module):
    """x times a weight; ``seconds`` are those of the forward pass and of both gradients.

    The gradient of the input runs with the weight's in the first stage, whose input has none.
    """

    def __init__(self, seconds: tuple[float, float, float], first: bool, last: bool) -> None:
        super().__init__()
        self.seconds, self.first, self.last = seconds, first, last
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, back, weight = self.seconds
        if self.first:
            out = _Sleep.apply(x * _Sleep.apply(self.weight, 0.0, weight), forward, back)
        else:
            out = _Sleep.apply(x, forward, back) * _Sleep.apply(self.weight, 0.0, weight)
        return out.sum().reshape(1) if self.last else out


def seconds_of_steps(
    schedule: str, pp: int, count: int, merged: bool, seconds: list[tuple[float, float, float]], steps: int
) -> list[float]:
    """Seconds of each of ``steps`` steps of ``count`` micro-batches, on a rank of ``pp``; one step comes before."""
    num_stages, made = len(seconds), []
    hidden = torch.empty(1, 4, device="meta", requires_grad=True)
    for number in stages_of_ranks(pp, num_stages // pp, schedule)[dist.get_rank()]:
        first, last = number == 0, number == num_stages - 1
        out = torch.empty(1, device="meta", requires_grad=True) if last else hidden
        make = partial(Stage, SlowStage(seconds[number], first, last), number, num_stages, torch.device("cpu"))
        made.append(make(input_args=hidden.detach() if first else hidden, output_args=out, group=dist.group.WORLD))
    options: Any = dict(n_microbatches=count, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)
    order = pipeline_order(schedule, pp, num_stages // pp, count, merged)
    run = ordered_schedule(made, order, MERGED_PASSES.run, **options)
    given = [torch.ones(count, 4)] if any(stage.is_first for stage in made) else []
    target = {"target": torch.zeros(count), "losses": []} if any(stage.is_last for stage in made) else {}
    for stage in made:
        stage.neighbours = (None, None)
    found = []
    for _ in range(1 + steps):
        dist.barrier()
        began = time.perf_counter()
        run.step(*given, **target)
        for stage in made:
            stage.finish_sends()
        found.append(time.perf_counter() - began)
    return found[1:]
