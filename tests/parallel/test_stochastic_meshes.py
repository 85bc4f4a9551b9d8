"""``optim.master_weights=stochastic`` in whole steps: where gradients are equal to the bit, so are parameters."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from recompute_cases import ROWS, STEPS, batches, make_config, world_size

import automoe.parallel.parallelize
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, OptimConfig
from automoe.parallel.fsdp import fsdp_modules
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.verify.compare import compare_trajectories
from automoe.verify.fake_world import fake_world
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.toys import DEEPSEEK
from tests.support.trajectories import run_trajectory


def stochastic(mesh: dict[str, int], rows: int, seed: int = 0, master_weights: str = "stochastic") -> Config:
    config = make_config(DEEPSEEK, mesh, rows)
    return replace(
        config,
        moe=replace(config.moe, experts="grouped_mm"),
        train=replace(config.train, dtype="bfloat16", seed=seed),
        optim=OptimConfig(lr=1e-3, master_weights=master_weights),
    )


def run(pool: RankPool, config: Config) -> Trajectory:
    return merge_trajectories(pool.run(run_trajectory, world_size(config), config, batches, STEPS))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mesh", "other"),
    [
        (dict(), dict(pp=2)),
        (dict(dp_shard=2), dict(dp_replicate=2)),
        pytest.param(dict(dp_shard=2), dict(dp_shard=2, pp=2), marks=pytest.mark.exhaustive),
    ],
    ids=["one-pp2", "dp_shard2-dp_replicate2", "dp2-pp2_dp2"],
)
def test_parameters_are_equal_to_the_bit(ranks: RankPool, mesh: dict[str, int], other: dict[str, int]) -> None:
    """Sums of two terms, and of micro-batches in one order, do not depend on who adds them."""
    first, second = (run(ranks, stochastic(axes, 2)) for axes in (mesh, other))
    assert len(first.parameters) == len(first.gradients[0]) > 40
    for name, parameter in first.parameters.items():
        assert parameter.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
    compared = [c for c in compare_trajectories(second, first) if c.kind in ("gradient", "updated parameter")]
    assert len(compared) == (STEPS + 1) * len(first.parameters)
    # A processor may sum squares in another order where a tensor lies elsewhere in memory, as FSDP's do.
    different = [c for c in compared if c.error > (1e-15 if c.kind == "gradient norm" else 0.0)]
    assert not different, str(different[0])


def run_with_fsdp(config: Config) -> Trajectory:
    with patch.object(automoe.parallel.parallelize, "stays_unsharded", return_value=False):
        return run_trajectory(config, batches, STEPS)


def test_one_rank_and_micro_batch_need_no_fsdp(ranks: RankPool) -> None:
    config = stochastic({}, ROWS)
    with fake_world(0, 1):
        for rows, wrapped in ((ROWS, False), (ROWS // 2, True)):
            few = stochastic({}, rows)
            meshes = build_meshes(resolve_mesh(few.mesh, 1), torch.device("cpu"))
            assert any(fsdp_modules(build_parts(few, meshes)[0])) == wrapped
    (without,) = ranks.run(run_trajectory, 1, config, batches, STEPS)
    (with_fsdp,) = ranks.run(run_with_fsdp, 1, config)
    assert without.losses == with_fsdp.losses and len(without.parameters) > 40
    compared = compare_trajectories(without, with_fsdp)
    assert {c.kind for c in compared} >= {"gradient", "updated parameter"}
    # A processor may sum squares in another order where a tensor lies elsewhere in memory, as FSDP's do.
    different = [c for c in compared if c.error > (1e-15 if c.kind == "gradient norm" else 0.0)]
    assert not different, str(different[0])


@pytest.mark.exhaustive
def test_training_stays_near_that_with_wider_copies(ranks: RankPool) -> None:
    """Three steps of a thousandth each: roundings of a unit, a 128th at most, are all that differs."""
    narrow, wide = (run(ranks, stochastic({}, 4, master_weights=kind)) for kind in ("stochastic", "float32"))
    for ours, theirs in zip(narrow.losses, wide.losses, strict=True):
        assert abs(ours - theirs) < 0.02
    for name, parameter in wide.parameters.items():
        unit = 2.0**-7 * parameter.abs() + 2e-3  # and two steps to the other side where a gradient is almost zero
        assert ((narrow.parameters[name] - parameter).abs() <= STEPS * unit).all(), name
