"""Routes of an engine on meshes: natural ones change no bit, and foreign ones mean the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mesh_cases import MODELS, STEPS, Case, batches
from mesh_mappings import DELAYED, DROP, FULL, INTERLEAVED, MERGED, NODES, PADDED, PARTS, RING, ULYSSES, ZBV

import automoe.comm.tokens
import automoe.verify.trajectory
from automoe.moe.router import BalancedRouter
from automoe.training.step import StepOptions
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
    Case("muse", dict(tp=2, ep=2), rows=4),  # experts on a latent
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


@pytest.mark.one_in(18)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_natural_routes_of_both_formats_change_no_bit(ranks: RankPool, natural, case: Case) -> None:
    one, forced = natural(case)
    replayed, shares = without_record(run(ranks, case, forced=forced, options=StepOptions(balance_replayed=True)))
    assert shares == [0.0] * STEPS
    different = differences(replayed, run(ranks, case), 0.0)
    assert not different, f"{len(different)} differ, first: {different[0]}"
    assert not differences(replayed, one, TOLERANCE)


def foreign(case: Case, natural) -> list[torch.Tensor]:
    """Routes of other weights, and of some tokens and layers only."""
    experts, forced = MODELS[case.family].num_experts, []
    for step, routes in enumerate(natural(case)[1]):
        drawn = torch.rand(*routes.shape[:3], experts, generator=torch.Generator().manual_seed(step)).argsort(-1)
        some = (routes[..., 0, :1] >= 0) & (drawn[..., :1] > 1)
        forced.append(torch.where(some, drawn[..., : routes.shape[-1]], -1).unsqueeze(3).to(torch.int16))
    return forced


@pytest.mark.one_in(18)
@pytest.mark.parametrize("case", [*CASES[9:], *CASES[:9]], ids=str)  # by default on tp, as natural ones on pp and dp
def test_foreign_routes_mean_the_same_on_every_mesh(ranks: RankPool, natural, case: Case) -> None:
    """Biases stand still, and all else is equal at 1e-10."""
    experts, forced = MODELS[case.family].num_experts, foreign(case, natural)
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


# ---------------------------------------------------------------- public failures, put in on purpose


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    return patch.object(owner, name, make(getattr(owner, name)))


def _with_inputs(change: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """Change the routes that a rank's step gets: (forced_ids of its rows, this rank's ones, meshes) -> forced_ids."""

    def make(original):
        def prepare(batch, meshes, config, device, forced_ids=None):
            inputs, trained = original(batch, meshes, config, device, forced_ids)
            return replace(inputs, forced_ids=change(forced_ids, inputs.forced_ids, meshes)), trained

        return prepare

    return _replaced(automoe.verify.trajectory, "prepare_inputs", make)


def _with_index(change: Callable[[Any, Any], int]) -> AbstractContextManager[Any]:
    """Let a router read the routes of another layer: (router, forced_ids) -> number of the layer."""

    def make(original):
        def replay(self, live, plain, tokens):
            own = self.moe_index
            if tokens.forced_ids is not None:
                self.moe_index = change(self, tokens.forced_ids)
            try:
                return original(self, live, plain, tokens)
            finally:
                self.moe_index = own

        return replay

    return _replaced(BalancedRouter, "replay", make)


def routes_of_the_first_cp_ranks_positions():
    return _with_inputs(lambda whole, own, meshes: whole[:, : own.shape[1]])


def routes_of_dp_ranks_dropped_at_a_merge():
    return _with_inputs(lambda whole, own, meshes: torch.full_like(own, -1) if meshes.dp_rank else own)


def padding_on_the_left_shifts_routes():
    return _with_inputs(lambda whole, own, meshes: own.roll(1, 1))


def samples_out_of_order():
    return _with_inputs(lambda whole, own, meshes: own.flip(0))


def layers_counted_from_the_stage():
    return _with_index(lambda router, forced: router.moe_index % 2)


def dense_layers_counted():
    return _with_index(lambda router, forced: (router.moe_index + 1) % forced.shape[2])


def modules_for_prediction_take_the_last_layers_routes():
    return _with_index(lambda router, forced: min(router.moe_index, forced.shape[2] - 1))


def biases_move():
    def make(original):
        return lambda *args, options: original(*args, options=StepOptions(balance_replayed=True))

    return _replaced(automoe.verify.trajectory, "optimizer_step", make)


def routes_outlive_their_micro_batch():
    def make(original):
        seen = {}

        def replay(self, live, plain, tokens):
            first = seen.setdefault(self.moe_index, tokens.forced_ids)
            return original(self, live, plain, replace(tokens, forced_ids=first))

        return replay

    return _replaced(BalancedRouter, "replay", make)


def tensor_ranks_take_the_first_shards_routes():
    def make(original):
        def local_shard(self, sequence):
            tokens = original(self, sequence)
            return replace(tokens, forced_ids=self.forced_ids[:, : tokens.index.shape[1]])

        return local_shard

    return _replaced(automoe.comm.tokens.Tokens, "local_shard", make)


def replay_does_nothing():
    def make(original):
        return lambda self, live, plain, tokens: (live, plain, original(self, live, plain, tokens)[2])

    return _replaced(BalancedRouter, "replay", make)


FAULTS: list[tuple[Callable[[], AbstractContextManager[Any]], Case]] = [
    (layers_counted_from_the_stage, CASES[0]),
    (routes_of_the_first_cp_ranks_positions, CASES[4]),
    (modules_for_prediction_take_the_last_layers_routes, CASES[8]),
    (biases_move, CASES[1]),
    (routes_outlive_their_micro_batch, CASES[1]),
    (tensor_ranks_take_the_first_shards_routes, CASES[7]),
    (routes_of_dp_ranks_dropped_at_a_merge, CASES[3]),
    (padding_on_the_left_shifts_routes, CASES[1]),
    (samples_out_of_order, CASES[1]),
    (dense_layers_counted, CASES[2]),
    (replay_does_nothing, CASES[18]),
]


def run_with_fault(fault: Callable[[], AbstractContextManager[Any]], *args: Any, **options: Any) -> Trajectory:
    with fault():
        return run_trajectory(*args, **options)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_public_failure_of_replay_would_be_found(ranks: RankPool, natural, fault, case: Case) -> None:
    forced = foreign(case, natural)
    parts = ranks.run(run_with_fault, case.world_size, fault, case.config, batches, STEPS, forced=forced)
    broken, _ = without_record(merge_trajectories(parts))
    expected, _ = without_record(run(ranks, case.reference, forced=forced))
    assert differences(broken, expected, 1e-6)
