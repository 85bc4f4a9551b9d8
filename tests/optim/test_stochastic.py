"""bfloat16 parameters rounded stochastically: right in the mean, nothing small is lost, the same on every mesh."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import automoe.optim.stochastic
from automoe.config.schema import OptimConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.kernels.counter_random import bits_at, stream_key
from automoe.optim.adamw import build_optimizer
from automoe.optim.schedule import set_learning_rate
from automoe.optim.stochastic import StochasticAdamW, round_stochastically
from automoe.verify.pool import RankPool
from tests.support.configurations import quick_config

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.3, master_weights="stochastic")


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    return bits_at(torch.arange(count), stream_key("test", seed))


@pytest.mark.parametrize("value", [1.0 + 2**-9, -1.7, 3e-3, -6.1e4, 1e-40])
def test_rounding_gives_neighbours_with_the_value_as_their_mean(value: float) -> None:
    count = 200_000
    x = torch.full((count,), value)
    exact = x[0].double()
    rounded = round_stochastically(x, random_bits(count))
    below, above = (side.double() for side in (rounded.min(), rounded.max()))
    nearest = x[0].bfloat16()
    step = abs((nearest.view(torch.int16) + 1).view(torch.bfloat16).double() - nearest.double())
    assert below < exact < above and above - below == step and len(rounded.unique()) == 2
    share = float((exact - below) / step)
    deviation = (share * (1 - share) / count) ** 0.5
    assert abs(float((rounded.double() == above).double().mean()) - share) < 4 * deviation


def test_what_bfloat16_holds_is_left_alone() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e30, float("inf"), float("-inf"), float("nan")]).bfloat16()
    for seed in range(50):
        rounded = round_stochastically(x.float(), random_bits(len(x), seed))
        assert torch.equal(rounded.view(torch.int16)[:-1], x.view(torch.int16)[:-1])
        assert rounded[-1].isnan()


def moved(master_weights: str, count: int = 4096, steps: int = 40) -> torch.Tensor:
    """How far parameters that start at one go down by ``steps`` updates of a 64th of a unit each."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.ones(1, count, dtype=torch.bfloat16))
    lr = 2.0**-8 / 64  # below one, the next number of bfloat16 is 2**-8 away
    optim = OptimConfig(lr=lr, weight_decay=0.0, master_weights=master_weights)
    optimizer = build_optimizer([layer], optim)
    for _ in range(steps):
        layer.weight.grad = torch.ones_like(layer.weight)  # constant: Adam's update is lr
        optimizer.step()
    return 1 - layer.weight.detach().double()


def test_updates_far_below_a_unit_move_the_mean_and_plain_rounding_loses_them() -> None:
    expected = 40 * 2.0**-8 / 64
    deviation = 2.0**-8 * (40 / 64 / 4096) ** 0.5  # of the mean: a step goes down a unit once in 64 times
    assert abs(float(moved("stochastic").mean()) - expected) < 4 * deviation
    assert float(moved("float32").abs().max()) == 0


@pytest.mark.parametrize("master_weights", ["stochastic", "float32"])
def test_narrow_moments_are_right_in_the_mean(master_weights: str) -> None:
    """Steps of a thousandth, which plain rounding would lose."""
    count, optim = 4096, replace(OPTIM, betas=(0.999, 0.999), moments="bfloat16", master_weights=master_weights)
    layer = nn.Module()
    stored = torch.bfloat16 if master_weights == "stochastic" else torch.float32
    layer.weight = nn.Parameter(torch.ones(1, count, dtype=stored))
    optimizer = build_optimizer([layer], optim)
    for step in range(41):
        layer.weight.grad = torch.ones_like(layer.weight) if step == 0 else torch.zeros_like(layer.weight)
        optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.state[layer.weight][name]
        assert moment.dtype == torch.bfloat16
        exact = 0.001 * 0.999**40
        # A unit is at most 2**-7 of a number; each of 40 steps rounds up or down by less than one.
        deviation = exact * 2**-7 * (40 / 4 / count) ** 0.5
        assert abs(float(moment.double().mean()) - exact) < 4 * deviation, name
        assert abs(float(moment.double().mean()) - 0.001) > 20 * deviation, name


def test_without_rounding_it_is_adamw() -> None:
    """Router weights, which stay in float32."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 4), nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [build_optimizer([ours], OPTIM), build_optimizer([theirs], replace(OPTIM, master_weights="float32"))]
    assert isinstance(optimizers[0], StochasticAdamW) and isinstance(optimizers[1], torch.optim.AdamW)
    for step in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_learning_rate(optimizer, 1e-2 / (step + 1))
            for parameter in model.parameters():
                parameter.grad = gradient_of(parameter, step)
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_moments_of_routers_stay_wide() -> None:
    model = nn.ModuleDict({"router": nn.Linear(6, 4), "linear": nn.Linear(6, 4)})
    layer = nn.ModuleDict({"mlp": model})
    optimizer = build_optimizer([layer], replace(OPTIM, master_weights="float32", moments="bfloat16"))
    kept = {name: optimizer.state[p]["exp_avg"].dtype for name, p in layer.named_parameters()}
    assert {name: dtype == torch.float32 for name, dtype in kept.items()} == {n: ".router." in n for n in kept}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.randn(4, 6, 8).bfloat16())
        self.linear = nn.Linear(8, 5, dtype=torch.bfloat16)


def gradient_of(parameter: torch.Tensor, step: int) -> torch.Tensor:
    index = torch.arange(parameter.numel(), dtype=torch.float64)
    return torch.sin(index * (step + 1)).view(parameter.shape).to(parameter.dtype)


def train(model: Model, seed: int = 0, steps: int = 4) -> dict[str, torch.Tensor]:
    optimizer = build_optimizer([model], OPTIM, seed)
    for step in range(steps):
        for parameter in model.parameters():
            gradient = gradient_of(parameter, step)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg_sq"].dtype == torch.float32
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def train_on_mesh(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    default = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    moe = init_device_mesh("cpu", shape, mesh_dim_names=("ep_shard", "ep"))
    model = Model()
    whole = model.experts.weight.detach()
    model.experts.weight = nn.Parameter(distribute_tensor(whole, moe["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=moe["ep_shard"], shard_placement_fn=lambda _: Shard(1))
    for name, placement in (("weight", Shard(1)), ("bias", Replicate())):
        tensor = getattr(model.linear, name).detach()
        setattr(model.linear, name, nn.Parameter(distribute_tensor(tensor, default["tp"], [placement])))
    fully_shard(model, mesh=default["dp_shard"])
    return train(model)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=["ep_shard2_ep2", "ep4"])
def test_every_mesh_rounds_alike(ranks: RankPool, shape: tuple[int, int]) -> None:
    expected = train(Model())
    for parameters in ranks.run(train_on_mesh, 4, shape):
        assert parameters.keys() == expected.keys()
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def train_on_mesh_by_local_index() -> dict[str, torch.Tensor]:
    def blocks(parameter: torch.Tensor):
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        yield slice(0, len(local)), torch.arange(local.numel()).view(local.shape)

    with patch.object(automoe.optim.stochastic, "indexed_blocks", blocks):
        return train_on_mesh((2, 2))


def test_roundings_by_local_index_are_seen(ranks: RankPool) -> None:
    expected = train(Model())
    for parameters in ranks.run(train_on_mesh_by_local_index, 4):
        assert not any(torch.equal(parameters[name], expected[name]) for name in ("experts.weight", "linear.weight"))


def test_names_steps_and_seeds_round_differently() -> None:
    first, other_seed = train(Model()), train(Model(), seed=1)
    assert not torch.equal(first["experts.weight"], other_seed["experts.weight"])
    twins = nn.ModuleDict({name: nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for name in "ab"})
    history = []
    optimizer = build_optimizer([twins], OPTIM)
    for _ in range(2):
        for layer in twins.values():
            nn.init.ones_(layer.weight)
            layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        history.append([layer.weight.detach().clone() for layer in twins.values()])
    (a, b), (a_again, _) = history
    assert not torch.equal(a, b) and not torch.equal(a, a_again)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.dtype=float32"], ["train.dtype=float32", " train.dtype=bfloat16"]),
        (
            ["train.dtype=bfloat16", "parallel.grad_sync=micro_batch", "mesh.pp=1"],
            ["added up in bfloat16", " parallel.grad_sync=step"],
        ),
        (
            ["optim.master_weights=float32", "optim.moments=bfloat16"],
            ["optim.moments=bfloat16", " train.dtype=bfloat16"],
        ),
    ],
)
def test_configurations_that_it_does_not_go_with(overrides: list[str], words: list[str]) -> None:
    config = quick_config(overrides=["optim.master_weights=stochastic", *overrides])
    with pytest.raises(ConfigError) as raised:
        validate(config, 4)
    assert all(word in str(raised.value) for word in words)
