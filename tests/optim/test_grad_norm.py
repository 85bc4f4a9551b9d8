"""One gradient norm for parameters of two meshes and several stages, against one process and torchtitan."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from automoe.optim.grad_norm import clip_, global_grad_norm
from automoe.verify.pool import RankPool
from tests.support.titan_norm import titan_grad_norm

E, H = 8, 12
X = torch.linspace(-1, 1, 3 * H, dtype=torch.float64).view(3, H)

# (pp, dp_replicate, dp_shard, ep_shard, ep)
MESHES = [(1, 1, 1, 1, 1), (1, 1, 4, 2, 2), (1, 2, 2, 1, 4), (1, 1, 3, 3, 1), (2, 1, 4, 2, 2), (2, 2, 2, 1, 4)]


class Experts(nn.Module):
    """Weights [E, H, H]; a rank uses those that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H, H, dtype=torch.float64))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.einsum("th,ehi->eti", x_TH, weight).square().sum()


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.linear = nn.Linear(H, 7, dtype=torch.float64)  # 7 rows: uneven shards
        self.experts = Experts()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        x_TH = self.norm(x_TH)
        return self.linear(x_TH).square().sum() + self.experts(x_TH.detach())


def one_process(stages: int) -> dict[str, torch.Tensor]:
    gradients = {}
    for stage in range(stages):
        layer = Layer(stage)
        layer(X).backward()
        gradients |= {f"{stage}.{name}": p.grad for name, p in layer.named_parameters()}
    return gradients


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(g.square().sum().item() for g in gradients.values()))


def build(shape: tuple[int, int, int, int, int]) -> tuple[Layer, DeviceMesh, int]:
    """This rank's stage with gradients, FSDP2 over two meshes, and the default mesh."""
    pp, dp_replicate, dp_shard, ep_shard, ep = shape
    default = init_device_mesh("cpu", (pp, dp_replicate, dp_shard), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    moe = init_device_mesh("cpu", (pp, ep_shard, ep), mesh_dim_names=("pp", "ep_shard", "ep"))
    stage = default.get_local_rank("pp")
    layer = Layer(stage)
    layer.experts.weight = nn.Parameter(distribute_tensor(layer.experts.weight.detach(), moe["ep"], [Shard(0)]))
    fully_shard(layer.experts, mesh=moe["ep_shard"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(layer, mesh=default["dp_replicate", "dp_shard"])
    layer(X).backward()  # the same rows everywhere: FSDP's mean is the gradient of one process
    return layer, default, stage


def norms(shape: tuple[int, int, int, int, int]) -> tuple[float, float]:
    layer, default, _ = build(shape)
    ours = global_grad_norm(layer.parameters(), default.get_group("pp"))
    return ours.item(), titan_grad_norm(layer.parameters(), default["pp"]).item()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_mesh_has_the_norm_of_one_process(ranks: RankPool, shape: tuple[int, ...]) -> None:
    expected = norm_of(one_process(shape[0]))
    for ours, titans in ranks.run(norms, math.prod(shape[:3]), shape):
        assert ours == pytest.approx(expected, rel=1e-13)
        assert titans == pytest.approx(expected, rel=1e-13)


def clipped(shape: tuple[int, int, int, int, int], max_norm: float) -> dict[str, torch.Tensor]:
    layer, default, stage = build(shape)
    clip_(layer.parameters(), global_grad_norm(layer.parameters(), default.get_group("pp")).item(), max_norm)
    return {f"{stage}.{name}": p.grad.full_tensor() for name, p in layer.named_parameters()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_clipping_scales_every_gradient_alike_or_not_at_all(ranks: RankPool, max_norm: float) -> None:
    expected = one_process(2)
    scale = 0.5 / norm_of(expected) if max_norm == 0.5 else 1.0
    for gradients in ranks.run(clipped, 8, (2, 1, 4, 2, 2), max_norm):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, scale * expected[name], rtol=1e-12, atol=0)


def collectives(shape: tuple[int, int, int, int, int], copies: int) -> int:
    layer, default, _ = build(shape)
    parameters = list(layer.parameters())
    for p in parameters[:]:  # more parameters of the same layouts
        for _ in range(copies):
            parameters.append(nn.Parameter(p.detach().clone()))
    reductions = 0
    all_reduce = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal reductions
        reductions += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        global_grad_norm(parameters, default.get_group("pp"))
    finally:
        dist.all_reduce = all_reduce
    return reductions


def test_collectives_do_not_grow_with_parameters(ranks: RankPool) -> None:
    # dp_shard; ep_shard and ep; pp
    assert ranks.run(collectives, 8, (2, 1, 4, 2, 2), 5) == [4] * 8


def poisoned(value: float) -> tuple[float, bool]:
    layer, _, _ = build((1, 1, 4, 2, 2))
    if dist.get_rank() == 3:
        layer.experts.weight.grad.to_local()[0, 0, 0] = value
    norm = global_grad_norm(layer.parameters())
    before = [p.grad.to_local().clone() for p in layer.parameters()]
    clip_(layer.parameters(), norm.item(), 1.0)
    after = [p.grad.to_local() for p in layer.parameters()]
    unchanged = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    return norm.item(), unchanged


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_bad_number_in_one_expert_reaches_every_rank_and_clips_nothing(ranks: RankPool, value: float) -> None:
    for norm, unchanged in ranks.run(poisoned, 4, value):
        assert not math.isfinite(norm)
        assert math.isnan(norm) == math.isnan(value)
        assert unchanged


def with_a_gradient_missing_on_one_rank() -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parameters = [nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])) for _ in range(2)]
    parameters.append(nn.Parameter(torch.zeros(1)))
    for value, parameter in enumerate(parameters, start=1):
        parameter.grad = torch.full_like(parameter, value)
    if dist.get_rank() == 1:
        parameters[0].grad = parameters[1].grad = None
    parameters.append(parameters[0])  # tied: the same tensor under two names
    return global_grad_norm(parameters).item()


def test_a_missing_gradient_counts_as_zeros_and_replicas_count_once(ranks: RankPool) -> None:
    # two elements of 1 and two of 2 on rank 0, and the plain tensor's 3 once
    assert ranks.run(with_a_gradient_missing_on_one_rank, 2) == [pytest.approx(math.sqrt(2 + 8 + 9))] * 2


def with_a_partial_gradient() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(4, 3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
    try:
        return str(global_grad_norm([parameter]).item())
    except ValueError as error:
        return str(error)


def test_an_unfinished_sum_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(with_a_partial_gradient, 2):
        assert re.search(r"shape \(4, 3\) is \(Partial.* and the parameter \(Replicate\(\),\)", message)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_float32_gradients_are_summed_in_float64(device: str) -> None:
    parameter = nn.Parameter(torch.zeros(1 << 20, device=device))
    parameter.grad = torch.full_like(parameter, 1e-25)  # squares underflow in float32
    norm = global_grad_norm([parameter])
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(1e-25 * 1024, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)])
def test_gradients_of_every_dtype_are_clipped_together(device: str, dtype: torch.dtype, rtol: float) -> None:
    """In place: a bfloat16 gradient is rounded once more, and once only."""
    parameters = [nn.Parameter(torch.zeros(50, device=device, dtype=t)) for t in (dtype, torch.float32, dtype)]
    for scale, parameter in enumerate(parameters, start=1):
        parameter.grad = (scale * torch.linspace(-1, 1, 50, dtype=torch.float64)).to(parameter)
    norm = global_grad_norm(parameters)
    expected = [0.125 / norm.cpu() * p.grad.double().cpu() for p in parameters]
    clip_(parameters, norm.item(), 0.125)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad.dtype == parameter.dtype
        tolerance = rtol if parameter.dtype == dtype else 1e-6
        torch.testing.assert_close(parameter.grad.double().cpu(), gradient, rtol=tolerance, atol=0)


def test_torchtitans_norm_changes_no_gradient() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)
    assert titan_grad_norm(parameters).item() == 4.0
    assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))
