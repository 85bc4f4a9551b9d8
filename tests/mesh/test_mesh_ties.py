"""Capacity by probability where tokens are exactly alike: which of them is dropped must not be rounding's choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mesh_cases import ROWS, STEPS, Case, batches

from automoe.config.schema import Config
from automoe.data.batch import StepBatch
from automoe.verify.compare import differences
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import merge_trajectories, run_trajectory

DROPS = dict(capacity_factor=0.75, drop_policy="probs", drop_scope="sequence")


def stuttering(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Rows of one document that say their first token over and over: all these tokens have the same past."""
    rows = batches(config, step, dp_rank, dp_size)
    tokens = rows.tokens.clone()
    tokens[:, : tokens.shape[1] // 2] = tokens[:, :1]
    return replace(rows, tokens=tokens)


@pytest.mark.parametrize("mesh", [dict(tp=2, ep=2), dict(cp=2), dict(dp_shard=2, tp=2, ep=4)], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_tokens_that_are_alike_are_dropped_alike(ranks: RankPool, family: str, mesh: dict[str, int]) -> None:
    def run(case: Case):
        return merge_trajectories(ranks.run(run_trajectory, case.world_size, case.config, stuttering, STEPS))

    reference = run(Case(family, rows=ROWS, moe=DROPS))
    case = Case(family, mesh, rows=2, moe=DROPS)
    assert not differences(run(case), reference, 1e-10)
