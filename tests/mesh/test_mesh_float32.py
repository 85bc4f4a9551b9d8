"""The first step in float32 with ``grouped_mm``, the reference run's routing forced on every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mesh_cases import Case, batches, float32
from mesh_mappings import FULL, INTERLEAVED

from automoe.config.schema import Config
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import run_trajectory

TOLERANCE = 1e-5
# Parameters are left out: Adam divides by the gradient's own size, so its first step turns the rounding
# of a gradient that is almost zero into a whole learning rate.
COMPARED = ("loss", "seq_balance_loss", "global_balance_loss", "expert counts", "gradient", "gradient norm")

CASES = [
    Case("deepseek", rows=2),
    Case("qwen3", dict(dp_shard=4, ep=2), rows=1),
    Case("mixtral", dict(dp_replicate=2, dp_shard=2, ep=4), rows=2, dispatcher="allgather"),
    Case("deepseek", dict(cp=2, ep=2), rows=4),
    Case("qwen3", dict(pp=2, dp_shard=2, ep=2), rows=2),
    Case("mixtral", dict(dp_shard=2, cp=2), rows=2),
    Case("deepseek", dict(pp=2, dp_shard=2, cp=2, ep=4), rows=1, parallel=INTERLEAVED),
    Case("qwen3", dict(tp=2, ep=2), rows=2),
    Case("qwen3", dict(tp=4, ep=4), rows=4, dispatcher="allgather"),
    Case("mixtral", dict(dp_shard=2, etp=2), rows=2),
    Case("deepseek", dict(dp_shard=2, tp=2, etp=2), rows=2, parallel=FULL),
    Case("mixtral", dict(cp=2, tp=2, ep=2, etp=2), rows=4),
    Case("gpt-oss", dict(dp_shard=2, tp=2, etp=2), rows=2),
    Case("gpt-oss", dict(pp=2, cp=2, ep=2), rows=2),
    Case("qwen3-next", dict(tp=2, ep=2), rows=4),
    Case("qwen3-next", dict(pp=2, dp_shard=2, ep=2), rows=2),
]


@pytest.fixture(scope="module")
def recorded(ranks: RankPool):
    runs: dict[str, Trajectory] = {}

    def get(case: Case) -> Trajectory:
        if case.family not in runs:
            [run] = ranks.run(run_trajectory, 1, float32(case.reference), batches, 1, record=True)
            runs[case.family] = run
        return runs[case.family]

    return get


def check_first_step(ranks: RankPool, case: Case, config: Config, expected: Trajectory) -> None:
    run = ranks.run(run_trajectory, case.world_size, config, batches, 1, forced=expected.choices)
    compared = [c for c in compare_trajectories(merge_trajectories(run), expected) if c.kind in COMPARED]
    different = [c for c in compared if not c.within(TOLERANCE)]
    assert not different, f"{len(different)} of {len(compared)} differ, first: {different[0]}"


@pytest.mark.one_in(18)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_first_step_with_forced_routing(ranks: RankPool, recorded, case: Case) -> None:
    check_first_step(ranks, case, float32(case), recorded(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_first_step_of_kernels_that_read_what_a_dispatcher_brings(ranks: RankPool, dispatcher: str) -> None:
    """Triton's, which want a pointer; in its interpreter, so one layer."""
    case = Case("mixtral", dict(dp_shard=2, ep=2), rows=4, dispatcher=dispatcher)

    def one_layer(case: Case, experts: str) -> Config:
        config = float32(case)
        return replace(config, model=replace(config.model, num_layers=1), moe=replace(config.moe, experts=experts))

    [expected] = ranks.run(run_trajectory, 1, one_layer(case.reference, "grouped_mm"), batches, 1, record=True)
    check_first_step(ranks, case, one_layer(case, "triton"), expected)


def test_forced_routing_is_what_both_runs_use(ranks: RankPool, recorded) -> None:
    """Other choices than its own give another loss, so the runs above really repeated the reference's."""
    case = CASES[0]
    expected = recorded(case)
    shifted = [(choices + 1) % 8 for choices in expected.choices]
    [run] = ranks.run(run_trajectory, 1, float32(case), batches, 1, forced=shifted)
    assert abs(run.losses[0] - expected.losses[0]) > 1e-3
    assert torch.equal(run.expert_counts[0], expected.expert_counts[0].roll(1, dims=1))
