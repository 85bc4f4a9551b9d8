"""Routes of an engine on meshes: natural ones change no bit, and foreign ones mean the same everywhere."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from mesh_cases import MODELS, STEPS, Case, batches
from mesh_mappings import DELAYED, DROP, FULL, INTERLEAVED, MERGED, NODES, PADDED, PARTS, RING, ULYSSES, ZBV

from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.routes import through_engines
from tests.support.trajectories import differences, run_trajectory

TOLERANCE = 1e-10
CASES = [
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=ZBV),
    Case("deepseek", rows=2),  # accumulation
    Case("deepseek", dict(pp=2), rows=2),
    Case("qwen3", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, **NODES),
    Case("deepseek", dict(cp=2), rows=4, parallel=FULL),
    Case("deepseek", dict(cp=2, tp=2, ep=2), rows=4, parallel=RING),
    Case("gpt-oss", dict(cp=2, tp=2, ep=2), rows=4, parallel=ULYSSES),
    Case("deepseek", dict(tp=2), rows=4),
    Case("deepseek-mtp", dict(cp=2, ep=2), rows=4, parallel=FULL),
    Case("qwen3", dict(tp=2, ep=2), rows=2, parallel=PARTS),
    Case("mixtral", dict(tp=2, etp=2), rows=2, moe=DROP),
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, moe=PADDED),
    Case("qwen3-tied", dict(pp=2, tp=2, etp=2), rows=2, parallel=INTERLEAVED),
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | DELAYED),
    Case("deepseek-mtp2", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | MERGED | dict(layout="Et|tttm|m|L")),
    Case("deepseek", dict(pp=2, dp_shard=2, cp=2, ep=4), rows=1, parallel=INTERLEAVED, **NODES),
    Case("qwen3-next", dict(tp=2, ep=2), rows=4, parallel=PARTS),  # hybrid attention
    Case("deepseek-sparse", dict(cp=2, tp=2, ep=2), rows=4),
]  # fmt: skip


def run(pool: RankPool, case: Case, **options) -> Trajectory:
    return merge_trajectories(pool.run(run_trajectory, case.world_size, case.config, batches, STEPS, **options))


@pytest.fixture(scope="module")
def natural(ranks: RankPool):
    """``natural(case)``: the case's run on one rank, and its routes after both engines' formats, per step."""

    @cache
    def of(name: str) -> tuple[Trajectory, list[torch.Tensor]]:
        case = next(case for case in CASES if str(case.reference) == name)
        one = run(ranks, case.reference, record=True)
        rows = [batches(case.config, step, 0, 1) for step in range(STEPS)]
        pairs = zip(one.choices, rows, strict=True)
        return one, [through_engines(choices, row, case.config.model) for choices, row in pairs]

    return lambda case: of(str(case.reference))


def without_record(replayed: Trajectory) -> tuple[Trajectory, list[float]]:
    """Split off the record's share of differing routes, which comes last."""
    shares = [metrics.pop() for metrics in replayed.metrics]
    return replayed, shares


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_natural_routes_of_both_formats_change_no_bit(ranks: RankPool, natural, case: Case) -> None:
    one, forced = natural(case)
    replayed, shares = without_record(run(ranks, case, forced=forced, balances=True))
    assert shares == [0.0] * STEPS
    different = differences(replayed, run(ranks, case), 0.0)
    assert not different, f"{len(different)} differ, first: {different[0]}"
    assert not differences(replayed, one, TOLERANCE)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_foreign_routes_mean_the_same_on_every_mesh(ranks: RankPool, natural, case: Case) -> None:
    """Routes of other weights, and of some tokens only: biases stand still, and all else is equal at 1e-10."""
    experts, forced = MODELS[case.family].num_experts, []
    for step, routes in enumerate(natural(case)[1]):
        drawn = torch.rand(*routes.shape[:3], experts, generator=torch.Generator().manual_seed(step)).argsort(-1)
        some = (routes[..., 0, :1] >= 0) & (drawn[..., :1] > 1)  # layers of a token differ
        forced.append(torch.where(some, drawn[..., : routes.shape[-1]], -1).unsqueeze(3).to(torch.int16))
    replayed, shares = without_record(run(ranks, case, forced=forced))
    expected, same = without_record(run(ranks, case.reference, forced=forced))
    different = differences(replayed, expected, TOLERANCE)
    assert not different, f"{len(different)} differ, first: {different[0]}"
    chance = 1 - MODELS[case.family].num_experts_per_token / experts
    assert shares == same and all(abs(share - chance) < 0.1 for share in shares)
    assert not any(bias.any() for bias in replayed.biases.values())
    for step in range(STEPS):
        forced_counts = torch.stack(
            [torch.bincount(layer[layer >= 0].long(), minlength=experts) for layer in forced[step].unbind(2)]
        )
        assert (replayed.expert_counts[step][: len(forced_counts)] >= forced_counts).all()
