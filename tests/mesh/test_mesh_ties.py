"""Capacity by probability where tokens are exactly alike: which of them is dropped must not be rounding's choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mesh_cases import ROWS, STEPS, Case, batches

from automoe.comm.tokens import StepBatch
from automoe.config.schema import Config
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import differences, run_trajectory

DROPS = dict(capacity_factor=0.75, drop_policy="probs", drop_scope="sequence")


def stuttering(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Rows of one document that say their first token over and over: all these tokens have the same past."""
    rows = batches(config, step, dp_rank, dp_size)
    tokens = rows.tokens.clone()
    tokens[:, : tokens.shape[1] // 2] = tokens[:, :1]
    return replace(rows, tokens=tokens)


def run(ranks: RankPool, case: Case) -> Trajectory:
    return merge_trajectories(ranks.run(run_trajectory, case.world_size, case.config, stuttering, STEPS))


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> dict[str, Trajectory]:
    return {family: run(ranks, Case(family, rows=ROWS, moe=DROPS)) for family in ("mixtral", "deepseek")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("mixtral", dict(tp=2, ep=2)),
        ("mixtral", dict(cp=2)),
        ("deepseek", dict(cp=2)),
        ("deepseek", dict(dp_shard=2, tp=2, ep=4)),
        ("deepseek", dict(tp=2, ep=2)),
        ("mixtral", dict(dp_shard=2, tp=2, ep=4)),
    ],
    ids=str,
)
def test_tokens_that_are_alike_are_dropped_alike(
    ranks: RankPool, references: dict[str, Trajectory], family: str, mesh: dict[str, int]
) -> None:
    got = run(ranks, Case(family, mesh, rows=2, moe=DROPS))
    assert not differences(got, references[family], 1e-10)
