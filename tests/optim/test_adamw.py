"""AdamW over two meshes: its groups, and the same update as on one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from automoe.config.schema import OptimConfig
from automoe.optim.adamw import build_optimizer
from automoe.optim.schedule import set_learning_rate
from automoe.verify.pool import RankPool

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.randn(4, 6, 8, dtype=torch.float64))
        self.linear = nn.Linear(8, 5, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.ones(3, 3, dtype=torch.float64), requires_grad=False)
        self.again = self.linear  # shared under a second name


def gradient_of(parameter: torch.Tensor, step: int) -> torch.Tensor:
    index = torch.arange(parameter.numel(), dtype=torch.float64)
    return torch.sin(index * (step + 1)).view(parameter.shape)


def train(model: Model) -> dict[str, torch.Tensor]:
    optimizer = build_optimizer([model], OPTIM)
    for step in range(3):
        set_learning_rate(optimizer, OPTIM.lr / (step + 1))
        for parameter in model.parameters():
            if parameter.requires_grad:
                gradient = gradient_of(parameter, step)
                if hasattr(parameter, "device_mesh"):
                    gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                parameter.grad = gradient
        optimizer.step()
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()}


def train_on_two_meshes() -> tuple[dict[str, torch.Tensor], list[tuple[str, float, list[tuple[int, ...]]]]]:
    default = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    moe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    model = Model()
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.detach(), moe["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=moe["ep_shard"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=default)
    groups = [
        (group["mesh"], group["weight_decay"], [tuple(p.shape) for p in group["params"]])
        for group in build_optimizer([model], OPTIM).param_groups
    ]
    return train(model), groups


def test_updates_equal_those_of_one_process(ranks: RankPool) -> None:
    expected = train(Model())
    for parameters, _ in ranks.run(train_on_two_meshes, 4):
        assert parameters.keys() == expected.keys()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-13, atol=1e-15)


def test_one_group_for_each_mesh_and_decay(ranks: RankPool) -> None:
    answers = [groups for _, groups in ranks.run(train_on_two_meshes, 4)]
    assert answers[0] == [
        ("dp_shard", 0.0, [(8,), (8,), (5,)]),
        ("ep_shard x ep", 0.3, [(4, 6, 8)]),
        ("dp_shard", 0.3, [(5, 8)]),
    ]
    assert all(groups == answers[0] for groups in answers)


def test_several_parts_share_groups_and_options_arrive() -> None:
    optimizer = build_optimizer([nn.Linear(2, 3), nn.Linear(3, 4)], OPTIM)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.9, 0.95), 1e-8)


def test_a_stage_without_parameters_has_an_optimizer_that_does_nothing() -> None:
    optimizer = build_optimizer([nn.Identity()], OPTIM)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}


def test_every_group_follows_the_schedule() -> None:
    optimizer = build_optimizer([nn.Linear(2, 3)], OPTIM)
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_a_parameter_of_two_parts_is_updated_once() -> None:
    """As the two ends of a pipeline on one rank may share an embedding."""
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    second.weight = first.weight
    optimizer = build_optimizer([first, second], OPTIM)
    assert sorted(name for group in optimizer.param_groups for name in group["names"]) == ["bias", "bias", "weight"]
    before = first.weight.detach().clone()
    first.weight.grad = torch.ones_like(before)
    optimizer.step()
    expected = before * (1 - OPTIM.lr * OPTIM.weight_decay) - OPTIM.lr
    torch.testing.assert_close(first.weight.detach(), expected)
