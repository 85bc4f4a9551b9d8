"""The kernel of ``optim.master_weights=stochastic``: plain torch's numbers to the bit, in the interpreter without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import automoe.kernels.stochastic_adamw
import automoe.optim.stochastic
from automoe.config.schema import OptimConfig
from automoe.optim.adamw import build_optimizer
from automoe.optim.stochastic import update_in_triton
from automoe.verify.pool import RankPool

# Of numpy, which the interpreter computes with.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.3, master_weights="stochastic")
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((5,), (1, 1), (3, 700), (1500,), (4, 2, 6, 8), (2, 1, 1030), (0, 3))


def in_one_pass():
    """The kernel wherever the optimizer would compute with torch, as it does on the CPU."""
    return patch.object(automoe.optim.stochastic, "update_in_torch", update_in_triton)


def module(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    made = nn.Module()
    generator = torch.Generator().manual_seed(len(shape))
    made.weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    return made


def gradient(shape: tuple[int, ...], dtype: torch.dtype, step: int) -> torch.Tensor:
    """Over all of float32's range: roots and quotients of numbers so small that they are not normal, and squares
    beyond the largest."""
    generator = torch.Generator().manual_seed(step)
    size = torch.randint(-80, 67, shape, generator=generator).float().exp2()
    drawn = torch.randn(shape, generator=generator) * size
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, drawn).to(dtype)


def trained(model: nn.Module, grad_dtype: torch.dtype, moments: str = "float32", steps: int = 3) -> list[torch.Tensor]:
    """The parameter and its moments, as integers."""
    optimizer = build_optimizer([model], replace(OPTIM, moments=moments))
    weight = model.weight
    for step in range(steps):
        drawn = gradient(tuple(weight.shape), grad_dtype, step)
        if isinstance(weight, DTensor):
            drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements)
        weight.grad = drawn.to(weight.dtype)
        optimizer.step()
    state = optimizer.state[weight]
    whole = [
        x.full_tensor() if isinstance(x, DTensor) else x.detach()
        for x in (weight, state["exp_avg"], state["exp_avg_sq"])
    ]
    return [x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32) for x in whole]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    shape=st.sampled_from(SHAPES), grad_dtype=st.sampled_from(DTYPES), moments=st.sampled_from(["float32", "bfloat16"])
)
@example(shape=(3, 700), grad_dtype=torch.float32, moments="float32")
@example(shape=(3, 700), grad_dtype=torch.bfloat16, moments="bfloat16")
@settings(max_examples=10)
def test_it_gives_the_numbers_of_plain_torch(
    dtype: torch.dtype, shape: tuple[int, ...], grad_dtype: torch.dtype, moments: str
) -> None:
    plain = trained(module(shape, dtype), grad_dtype, moments)
    with in_one_pass():
        fused = trained(module(shape, dtype), grad_dtype, moments)
    kept = torch.int16 if moments == "bfloat16" else torch.int32
    assert [x.dtype for x in fused[1:]] == [kept] * 2
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([1.0, float("inf"), float("-inf"), float("nan"), 3.3e38, -3.3e38]).bfloat16()
    results = []
    for use in (in_one_pass, nullcontext):
        model = nn.Module()
        model.weight = nn.Parameter(values.clone())
        optimizer = build_optimizer([model], OPTIM)
        model.weight.grad = torch.tensor([float("nan"), 1.0, 1.0, 1.0, -1.0, 1.0]).bfloat16()
        with use():
            optimizer.step()
        results.append(model.weight.detach())
    fused, plain = results
    assert fused.isnan().tolist() == plain.isnan().tolist() == [True, False, False, True, False, False]
    assert torch.equal(fused[~fused.isnan()], plain[~plain.isnan()])


def test_a_launch_asks_for_products_and_sums_that_are_not_fused() -> None:
    """As in the test that compiles the kernel and reads that there are none; the interpreter fuses nothing anyway."""
    with patch.object(automoe.kernels.stochastic_adamw, "update_part", MagicMock()) as kernel, in_one_pass():
        trained(module((5,), torch.bfloat16), torch.bfloat16, steps=1)
    assert kernel.__getitem__.return_value.call_args.kwargs["enable_fp_fusion"] is False


PLACEMENTS = {
    "rows": [Shard(0), Replicate()],
    "columns": [Shard(2), Shard(0)],
    "both": [Shard(1), Shard(2)],  # an expert's down_proj under ep_shard and etp
    "rows, uneven": [Shard(0), Shard(1)],
}


def trained_on_mesh(placements: list, shape: tuple[int, ...], moments: str) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "etp"))
    model = module(shape, torch.bfloat16)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
    with in_one_pass():
        return trained(model, torch.bfloat16, moments)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_mesh_gives_them(ranks: RankPool, name: str) -> None:
    shape = (3, 5, 8) if "uneven" in name else (4, 6, 8)
    moments = "bfloat16" if name == "both" else "float32"
    plain = trained(module(shape, torch.bfloat16), torch.bfloat16, moments)
    for fused in ranks.run(trained_on_mesh, 4, PLACEMENTS[name], shape, moments):
        assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
