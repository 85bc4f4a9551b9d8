"""Private parts of torch's FSDP: sums of gradients before the reduction, and units after an error."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from automoe.interop import torch_fsdp
from automoe.verify.pool import RankPool

pytestmark = pytest.mark.usefixtures("release")


def sums_of_two_micro_batches() -> tuple[list[torch.dtype], list[float], list[float]]:
    """Of a weight in bfloat16, with a number added by hand between the gradients that autograd returns."""
    layer = nn.Linear(2, 4, bias=False)
    nn.init.ones_(layer.weight)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mp_policy=policy)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    seen, dtypes = [], []
    for last in (False, True):
        layer.set_requires_gradient_sync(last)
        out = layer(torch.ones(1, 2, requires_grad=True))
        if last:
            waiting = torch_fsdp.gradient_sum(layer, "weight")
            seen.append(float(waiting.sum()))
            dtypes.append(waiting.dtype)
            waiting.add_(2.0**-12)  # bfloat16 would lose it beside 1
            assert torch_fsdp.gradient_sum(layer, "weight") is waiting
        else:
            first = torch_fsdp.gradient_sum(layer, "weight")
            seen.append(float(first.abs().sum()))
        out.sum().backward()
    return dtypes, seen, layer.weight.grad.to_local().flatten().tolist()


def test_a_sum_of_gradients_is_found_made_and_reduced(ranks: RankPool) -> None:
    for dtypes, seen, reduced in ranks.run(sums_of_two_micro_batches, 2):
        assert dtypes == [torch.float32]
        assert seen == [0.0, 8.0]
        assert reduced == [4 + 2.0**-11] * 4  # two ranks, two micro-batches


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")


def kinds_after_an_error() -> list[bool]:
    """Is the weight a shard: before a forward pass that fails, after it, by FSDP's own way back, by ours."""
    layer = Failing(2, 4, bias=False)
    fully_shard(layer)
    layer.set_reshard_after_forward(False)
    assert len(torch_fsdp.parameter_groups(fully_shard.state(layer))) == 1
    seen = [isinstance(layer.weight, DTensor)]
    with pytest.raises(RuntimeError, match="no memory"):
        layer(torch.ones(1, 2))
    seen.append(isinstance(layer.weight, DTensor))
    for reshard in (lambda unit: unit.reshard(), torch_fsdp.forget_pass):
        reshard(layer)
        seen.append(isinstance(layer.weight, DTensor))
    return seen


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")


class Between(nn.Module):
    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(x) if self.breaks else x


def gradients_after_an_error() -> list[list[float]]:
    """Of a unit within a root: of a step, and of the same step after one that failed between their backward passes."""
    model = nn.Sequential(nn.Linear(2, 4, bias=False), Between(), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    fully_shard(model[0])
    fully_shard(model)
    seen = []
    for fails in (False, True, False):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model[1].breaks = fails and last
            with pytest.raises(RuntimeError, match="no memory") if fails and last else nullcontext():
                model(torch.full((1, 2), 2.0 + last)).sum().backward()
        if fails:
            torch_fsdp.forget_pass(model)
        if not fails:
            seen.append([value for p in model.parameters() for value in p.grad.full_tensor().flatten().tolist()])
        model.zero_grad()
    return seen


def test_gradients_of_a_pass_that_failed_are_forgotten(ranks: RankPool) -> None:
    for first, again in ranks.run(gradients_after_an_error, 2):
        assert first == again and any(first)


def test_a_unit_whose_forward_pass_failed_is_sharded_again(ranks: RankPool) -> None:
    for seen in ranks.run(kinds_after_an_error, 2):
        assert seen == [True, False, False, True]
