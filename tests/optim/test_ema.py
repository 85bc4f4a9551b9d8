"""Averages of weights: torch's formula, weights of their own for a validation and back, narrow weights in float32."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from automoe.config.schema import OptimConfig
from automoe.optim.adamw import build_optimizer
from automoe.optim.ema import KEY, averaged_weights, take_averages, update_averages

OPTIM = OptimConfig(lr=0.1, ema_decay=0.9)


def trained(dtype: torch.dtype, optim: OptimConfig, steps: int = 5):
    """A model of matrices and biases, one of them frozen, its optimizer, and its weights after each step, from 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    model[1].bias.requires_grad_(False)
    optimizer = build_optimizer([model], optim)
    kept = [copy.deepcopy(model)]
    for step in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.sin(torch.arange(parameter.numel()) * (step + 1.0)).view_as(parameter).to(dtype)
        optimizer.step()
        update_averages(optimizer, optim.ema_decay)
        kept.append(copy.deepcopy(model))
    return model, optimizer, kept


def test_averages_are_those_of_swa_utils() -> None:
    model, optimizer, kept = trained(torch.float64, OPTIM)
    theirs = AveragedModel(kept[0], avg_fn=get_ema_avg_fn(OPTIM.ema_decay))
    for one in kept:  # the first of them is taken as it is
        theirs.update_parameters(one)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            average = optimizer.state[parameter][KEY]
            torch.testing.assert_close(average, theirs.module.get_parameter(name).detach(), rtol=1e-14, atol=1e-15)
            assert not torch.equal(average, parameter)
    assert optimizer.state.get(model[1].bias) is None, "what is frozen has no average"


def test_narrow_weights_have_wide_averages() -> None:
    """One step of a thousand moves them by less than bfloat16 can tell."""
    optim = OptimConfig(lr=0.1, ema_decay=0.999, master_weights="stochastic", moments="bfloat16")
    model, optimizer, kept = trained(torch.bfloat16, optim)
    expected = kept[0][0].weight.float()
    for one in kept[1:]:
        expected = expected.lerp(one[0].weight.float(), 1 - 0.999)
    average = optimizer.state[model[0].weight][KEY]
    assert average.dtype == torch.float32 and torch.equal(average, expected.detach())
    assert not torch.equal(average, average.bfloat16().float())


def test_weights_are_averages_for_a_while_and_their_own_after_it() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        narrow = dtype == torch.bfloat16
        optim = OptimConfig(lr=0.1, ema_decay=0.9, master_weights="stochastic" if narrow else "float32")
        model, optimizer, kept = trained(dtype, optim)
        averages = {name: optimizer.state.get(p, {}).get(KEY) for name, p in model.named_parameters()}
        before = {name: None if average is None else average.clone() for name, average in averages.items()}
        with averaged_weights(optimizer):
            inside = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            last = kept[-1].get_parameter(name)
            assert torch.equal(parameter, last)
            if before[name] is None:
                assert torch.equal(inside[name], last)
                continue
            assert torch.equal(inside[name], before[name].to(dtype)) and torch.equal(averages[name], before[name])
            assert not torch.equal(inside[name], last)
        take_averages(optimizer)
        assert all(torch.equal(parameter, inside[name]) for name, parameter in model.named_parameters())
