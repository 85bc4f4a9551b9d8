"""Averages of weights: torch's formula, weights of their own for a validation and back, narrow weights in float32."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import AttentionConfig, Config, MeshConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig
from automoe.optim.adamw import build_optimizer
from automoe.optim.ema import KEY, averaged_weights, take_averages, update_averages
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.stats import sum_over_ranks
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool

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


MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=264,
    hidden_size=16,
    num_layers=2,
    num_experts=4,
    moe_intermediate_size=8,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
)


def losses_of(config: Config) -> list[float]:
    """Of a batch with the weights, with averages (half of each weight), with the weights again, with averages taken."""
    cpu = torch.device("cpu")
    meshes = build_meshes(resolve_mesh(config.mesh, None), cpu)
    parts = build_parts(config, meshes)
    materialize(parts, config, cpu)
    runner, optimizer = build_runner(parts, meshes, config, cpu), build_optimizer(list(parts.values()), config.optim)
    for state in optimizer.state.values():
        state[KEY].mul_(0.5)
    tokens = (torch.arange(4 * 64).view(4, 64) % 251).chunk(meshes.shape.dp)[meshes.dp_rank]
    positions = torch.arange(64).expand(len(tokens), -1).contiguous()
    batch = StepBatch(tokens, tokens, positions, torch.zeros_like(tokens), 0, 0)

    def loss() -> float:
        [total] = sum_over_ranks(runner.evaluate(prepare_inputs(batch, meshes, config, cpu)[0]), device=cpu)
        return total

    own = loss()
    with averaged_weights(optimizer):
        averaged = loss()
    again = loss()
    take_averages(optimizer)
    return [own, averaged, again, loss()]


def test_a_sharded_model_is_evaluated_with_its_averages(ranks: RankPool) -> None:
    """What FSDP gathered before would be the weights."""
    train = TrainConfig(seq_len=64, global_batch_size=4, micro_batch_size=1, dtype="float64")
    config = Config(model=MODEL, moe=MoEConfig(experts="loop"), train=train, optim=OPTIM)
    expected = None
    for mesh in ({}, {"pp": 2, "dp_shard": 2, "ep": 2}):
        config = replace(config, mesh=MeshConfig(**({"dp_shard": 1} | mesh)))
        for found in ranks.run(losses_of, resolve_mesh(config.mesh, None).world_size, config):
            own, averaged, again, taken = found
            assert own == again and averaged == taken and abs(own - averaged) > 1e-4
            expected = expected or found
            assert found == pytest.approx(expected, rel=1e-10)
