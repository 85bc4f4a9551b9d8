"""What routing rules promise about meshes: float64, every number and tensor at 1e-10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from routing_cases import ROWS, STEPS, routing_config, run_routing

from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory
from tests.support.trajectories import differences

TOLERANCE = 1e-10

# What is on, in runs that every mesh must repeat.
RULES: dict[str, dict[str, Any]] = {
    "losses": dict(
        router=dict(score="sqrt_softplus", expert_bias=True, num_groups=4, topk_groups=2),
        seq_balance_coef=0.02,
        global_balance_coef=0.03,
        z_loss_coef=0.02,
        router_jitter=0.2,
    ),
    "probs": dict(capacity_factor=1.0, drop_scope="sequence", drop_policy="probs", z_loss_coef=0.01),
    "position": dict(
        router=dict(softmax_after_topk=True, exact_ties=True),
        capacity_factor=0.75,
        drop_scope="sequence",
        drop_policy="position",
        seq_balance_coef=0.02,
    ),
    "padded": dict(router=dict(score="sigmoid"), capacity_factor=1.0, drop_scope="sequence", pad_to_capacity=True),
    "zipf": dict(gate="zipf", capacity_factor=1.0, drop_scope="sequence"),
}

MESHES: dict[str, dict[str, Any]] = {
    "dp2-ep2": dict(mesh=dict(dp_shard=2, ep=2), rows=1),
    "cp2": dict(mesh=dict(cp=2), rows=2),
    "tp2-ep2": dict(mesh=dict(tp=2, ep=2), rows=2),
    "cp2-tp2-ep2-etp2": dict(mesh=dict(cp=2, tp=2, ep=2, etp=2), rows=4),
    "pp2-cp2-ep2-allgather": dict(mesh=dict(pp=2, cp=2, ep=2), rows=2, dispatcher="allgather"),
}

PAIRS = [
    ("losses", "dp2-ep2"),
    ("losses", "pp2-cp2-ep2-allgather"),
    ("losses", "cp2-tp2-ep2-etp2"),
    ("probs", "dp2-ep2"),
    ("probs", "pp2-cp2-ep2-allgather"),
    ("probs", "cp2"),
    ("position", "tp2-ep2"),
    ("probs", "cp2-tp2-ep2-etp2"),
    ("padded", "cp2"),
    ("position", "cp2-tp2-ep2-etp2"),
    ("padded", "tp2-ep2"),
    ("padded", "cp2-tp2-ep2-etp2"),
    ("zipf", "cp2"),
    ("zipf", "dp2-ep2"),
]


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool):
    """``one_rank(rules)``: the run on one rank with the whole batch at once."""
    runs: dict[str, Trajectory] = {}

    def get(rules: str) -> Trajectory:
        if rules not in runs:
            runs[rules] = run_routing(ranks, routing_config(rows=ROWS, **RULES[rules]))
        return runs[rules]

    return get


def assert_equal(got: Trajectory, expected: Trajectory) -> None:
    different = differences(got, expected, TOLERANCE)
    assert not different, f"{len(different)} differ, first: {different[0]}"


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("rules", "mesh"), PAIRS, ids=map("-".join, PAIRS))
def test_a_rule_means_the_same_on_every_mesh(ranks: RankPool, one_rank, rules: str, mesh: str) -> None:
    assert_equal(run_routing(ranks, routing_config(**MESHES[mesh], **RULES[rules])), one_rank(rules))


@pytest.mark.parametrize("rules", RULES)
def test_the_rules_act(one_rank, rules: str) -> None:
    """A loss that is zero or a capacity that is never reached would be equal everywhere for nothing."""
    run, on = one_rank(rules), RULES[rules]
    for step in range(STEPS):
        assert (run.z_loss[step] > 1e-3) == ("z_loss_coef" in on)
        assert all((share > 0.02) == ("capacity_factor" in on) for share in run.dropped_share[step])


def test_padding_to_capacity_changes_nothing(ranks: RankPool, one_rank) -> None:
    unpadded = RULES["padded"] | dict(pad_to_capacity=False)
    assert_equal(run_routing(ranks, routing_config(mesh=dict(cp=2, ep=2), **unpadded)), one_rank("padded"))


def test_padding_to_the_capacity_of_a_rank_changes_nothing(ranks: RankPool) -> None:
    on = dict(mesh=dict(dp_shard=2, ep=2), rows=2, capacity_factor=0.8, drop_scope="rank")
    padded = run_routing(ranks, routing_config(**on, pad_to_capacity=True))
    assert_equal(padded, run_routing(ranks, routing_config(**on)))
    assert min(padded.dropped_share[0]) > 0


def test_what_a_rank_drops_depends_on_the_mesh_and_enough_capacity_is_dropless(ranks: RankPool) -> None:
    one = run_routing(ranks, routing_config(rows=ROWS, capacity_factor=1.0))
    two = run_routing(ranks, routing_config(mesh=dict(cp=2), rows=ROWS, capacity_factor=1.0))
    assert one.dropped_share[0] != two.dropped_share[0]
    dropless = run_routing(ranks, routing_config(rows=ROWS))
    roomy = routing_config(mesh=dict(cp=2, ep=2), rows=ROWS, capacity_factor=8 / 3)
    assert_equal(run_routing(ranks, roomy), dropless)


def test_dropping_is_repeated_and_not_counted_twice_by_recomputation(ranks: RankPool, one_rank) -> None:
    config = routing_config(rows=2, parallel=dict(recompute="full"), **RULES["probs"])
    assert_equal(run_routing(ranks, config), one_rank("probs"))


CLASSICAL = dict(micro_batch_balance_coef=0.05)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "mesh",
    [dict(dp_replicate=2, ep=2), dict(dp_shard=2, cp=2, ep=4), dict(dp_shard=2, tp=2), dict(pp=2, dp_shard=2)],
    ids=str,
)
def test_micro_batch_balance_is_equal_where_the_same_rows_meet(ranks: RankPool, mesh: dict[str, int]) -> None:
    """Two data-parallel ranks with micro-batches of one row, whatever the other axes."""
    expected = run_routing(ranks, routing_config(mesh=dict(dp_shard=2), rows=1, **CLASSICAL))
    assert_equal(run_routing(ranks, routing_config(mesh=mesh, rows=1, **CLASSICAL)), expected)


def test_micro_batch_balance_changes_with_accumulation_alone(ranks: RankPool) -> None:
    whole = run_routing(ranks, routing_config(rows=ROWS, **CLASSICAL))
    assert_equal(run_routing(ranks, routing_config(mesh=dict(dp_shard=2), rows=2, **CLASSICAL)), whole)
    accumulated = run_routing(ranks, routing_config(rows=1, **CLASSICAL))
    share = accumulated.micro_batch_balance_loss[0] / whole.micro_batch_balance_loss[0]
    assert 1e-3 < abs(share - 1) < 0.5  # a mean over micro-batches, not their sum
    assert accumulated.losses[0] == pytest.approx(whole.losses[0], rel=TOLERANCE)


@pytest.mark.exhaustive
def test_recorded_routing_is_repeated_on_other_meshes(ranks: RankPool, tmp_path: Path) -> None:
    directory = str(tmp_path)
    recording = routing_config(
        mesh=dict(pp=2, cp=2, tp=2, ep=2), rows=2, router=dict(expert_bias=True), record_routing=directory
    )
    recorded = run_routing(ranks, recording)
    # Other weights would choose otherwise.
    for mesh in (dict(dp_shard=2, ep=2), dict(cp=2)):
        replayed = run_routing(
            ranks, routing_config(mesh=mesh, seed=1, router=dict(expert_bias=True), replay_routing=directory)
        )
        assert replayed.losses[0] != recorded.losses[0]
        for step in range(STEPS):
            assert torch.equal(replayed.expert_counts[step], recorded.expert_counts[step])
    free = run_routing(ranks, routing_config(seed=1, router=dict(expert_bias=True)))
    assert not torch.equal(free.expert_counts[0], recorded.expert_counts[0])


def test_replay_from_disk_is_forced_routing(ranks: RankPool, tmp_path: Path) -> None:
    config = routing_config(rows=2, record_routing=str(tmp_path))
    choices = run_routing(ranks, config, record=True).choices
    other = dict(mesh=dict(cp=2), rows=2, seed=1)
    forced = run_routing(ranks, routing_config(**other), forced=choices)
    replayed = run_routing(ranks, routing_config(**other, replay_routing=str(tmp_path)))
    assert not differences(replayed, forced, 0.0)
