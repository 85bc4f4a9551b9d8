"""Sums of rows by index: what CUDA computes has the order, and in float32 and float64 the bits, of the CPU's."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from automoe.kernels.row_sums import gather_rows, sum_in_order, sum_rows
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import run_trajectory

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def one_after_the_other(rows: torch.Tensor, index: torch.Tensor, num_sums: int) -> torch.Tensor:
    """The definition, in the dtype of the rows."""
    out = torch.zeros(num_sums, rows.shape[1], dtype=rows.dtype)
    for row, number in zip(rows, index.tolist(), strict=True):
        if number < num_sums:
            out[number] += row
    return out


@given(
    num_rows=st.integers(0, 60),
    num_sums=st.integers(1, 12),
    width=st.integers(1, 40),
    wide=st.booleans(),
    seed=st.integers(0, 9),
)
def test_both_ways_have_the_bits_of_a_loop(num_rows: int, num_sums: int, width: int, wide: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if wide else torch.float32
    rows = torch.randn(num_rows, width, generator=generator, dtype=dtype)
    index = torch.randint(num_sums + 1, (num_rows,), generator=generator)
    expected = one_after_the_other(rows, index, num_sums)
    assert torch.equal(sum_rows(rows, index, num_sums), expected)
    assert torch.equal(sum_in_order(rows, index, num_sums), expected)


def test_another_order_has_other_bits() -> None:
    """So the bits above are those of an order."""
    rows, index = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
    assert not torch.equal(sum_rows(rows.flip(0), index.flip(0), 4), sum_rows(rows, index, 4))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_narrow_rows_are_accumulated_in_float32(device: str) -> None:
    """A sum of 4,096 ones, of which bfloat16 alone would reach 256; on CUDA every element of a random sum is rounded once."""
    ones = torch.ones(4096, 24, dtype=torch.bfloat16, device=device)
    assert sum_in_order(ones, torch.zeros(4096, dtype=torch.int64, device=device), 2).tolist() == [
        [4096] * 24,
        [0] * 24,
    ]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2000, 24, generator=generator).to(device, torch.bfloat16)
    index = torch.randint(101, (2000,), generator=generator).to(device)
    got = sum_in_order(rows, index, 100)
    wide = sum_in_order(rows.float(), index, 100)
    assert ((got - wide).abs() <= wide.abs() * 2.0**-8).all()
    if device == "cuda":
        assert torch.equal(got, wide.to(torch.bfloat16)) and torch.equal(got, sum_in_order(rows, index, 100))
        assert torch.equal(wide.cpu(), sum_rows(rows.float().cpu(), index.cpu(), 100))


def test_gathered_rows_have_summed_gradients() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 4, 4, 2])
    torch.autograd.gradcheck(lambda x: gather_rows(x, index), x)
    assert torch.equal(gather_rows(x, index), x[index])


CONFIG = Config(
    model=ModelConfig(
        family="qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_experts=8,
        num_experts_per_token=4,
        moe_intermediate_size=16,
    ),
    train=TrainConfig(seq_len=16, global_batch_size=4, micro_batch_size=2),
)
CASES: dict[str, tuple[dict[str, int], dict[str, object]]] = {
    "alltoall": (dict(dp_shard=2, ep=2), {}),
    "one rank": ({}, {}),
    "hierarchical": (dict(dp_shard=4, ep=4), dict(dispatcher="hierarchical")),
    "padded": (dict(dp_shard=2, ep=2), dict(capacity_factor=1.0, drop_scope="sequence", pad_to_capacity=True)),
    "allgather": (dict(dp_shard=2, ep=2), dict(dispatcher="allgather")),
    "etp": (dict(tp=2, etp=2), {}),
}


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    rows, length = config.train.global_batch_size // dp_size, config.train.seq_len
    tokens = torch.randint(64, (rows, length + 1), generator=torch.Generator().manual_seed(10 * step + dp_rank))
    positions = torch.arange(length).expand(rows, length)
    return StepBatch(tokens[:, :-1], tokens[:, 1:].clone(), positions, torch.zeros_like(positions), 0, dp_rank * rows)


def as_on_cuda(config: Config) -> Trajectory:
    # Every module that imports the function has a name of its own for it.
    users = [
        module for name, module in sys.modules.items() if name.startswith("automoe.") and hasattr(module, "sum_rows")
    ]
    assert len(users) > 1
    with ExitStack() as stack:
        for module in users:
            stack.enter_context(patch.object(module, "sum_rows", sum_in_order))
        return run_trajectory(config, batches, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(CASES), ids=str)
@pytest.mark.parametrize("dtype, experts", [("float32", "grouped_mm"), ("float64", "loop")])
def test_whole_steps_have_the_same_bits(ranks: RankPool, name: str, dtype: str, experts: str) -> None:
    mesh, moe = CASES[name]
    config = replace(
        CONFIG,
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        moe=MoEConfig(experts=experts, **moe),  # type: ignore[arg-type]
        train=replace(CONFIG.train, dtype=dtype, micro_batch_size=4 // mesh.get("dp_shard", 1)),
        cluster=replace(CONFIG.cluster, gpus_per_node=2),
    )
    world = MeshShape.of(config.mesh).world_size
    usual, ordered = (
        merge_trajectories(ranks.run(run, world, config, *args))
        for run, args in ((run_trajectory, (batches, 2)), (as_on_cuda, ()))
    )
    assert max(one.error for one in compare_trajectories(ordered, usual)) == 0
