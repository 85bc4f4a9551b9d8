"""Weights are quantized once a step wherever they stay whole, with the bits of quantizing them each time."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fp8_cases import LINEARS, batches, config

import automoe.training.step
from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.parallel.fp8 import weights_quantized_once
from automoe.planner.memory import plan_memory
from automoe.quantize.scaling import Blockwise, Tensorwise, W
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import run_trajectory

STEPS = 2
FREED = dict(parallel=dict(reshard="micro_batch"))
FULL = dict(parallel=dict(recompute="full"))
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tensorwise, tp and etp, recomputed": ("tensorwise", dict(tp=2, etp=2), FULL),
    "delayed, pipeline": ("delayed", dict(pp=2, dp_shard=2, ep=2), {}),
    "blockwise, one rank": ("blockwise", {}, {}),
    "delayed, recomputed": ("delayed", dict(dp_shard=2, ep=2), FULL),
    "blockwise, experts sharded": ("blockwise", dict(dp_shard=2, ep=1, ep_shard=2), FULL),
    "tensorwise, interleaved": (
        "tensorwise",
        dict(pp=2, ep=1),
        dict(parallel=dict(schedule="Interleaved1F1B", stages_per_rank=2), model=dict(num_layers=4)),
    ),
}


def settings(name: str) -> Config:
    """Two micro-batches a rank or more, in float32."""
    mode, mesh, changes = CASES[name]
    made = config(mode, mesh, rows=1)
    return replace(made, **{part: replace(getattr(made, part), **values) for part, values in changes.items()})


def steps(settings: Config, once: bool) -> tuple[Trajectory, list[int]]:
    """The trajectory, and how often each weight of this rank was quantized."""
    calls: Counter[int] = Counter()

    def counting(kind: type) -> Any:
        real = kind.quantize

        def quantize(self: Any, tensor: torch.Tensor, scales: Any, operand: int) -> Any:
            if operand == W:
                calls[id(self)] += 1
            return real(self, tensor, scales, operand)

        return mock.patch.object(kind, "quantize", quantize)

    each_time = mock.patch.object(automoe.training.step, "weights_quantized_once", lambda *_: nullcontext())
    with counting(Tensorwise), counting(Blockwise), nullcontext() if once else each_time:
        trajectory = run_trajectory(settings, batches, STEPS)
    return trajectory, list(calls.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(CASES), ids=str)
def test_once_a_step_and_to_the_bit(ranks: RankPool, name: str) -> None:
    made = settings(name)
    world = resolve_mesh(made.mesh, None).world_size
    kept, usual = (ranks.run(steps, world, made, once) for once in (True, False))
    for (_, once), (_, often) in zip(kept, usual, strict=True):
        # Several layers have experts whose one product ran for no token of this rank.
        assert once and set(once) <= {1, STEPS} and STEPS in once
        assert sum(often) >= 4 * sum(once)  # both passes of two micro-batches
    got, expected = (merge_trajectories([trajectory for trajectory, _ in runs]) for runs in (kept, usual))
    assert max(one.error for one in compare_trajectories(got, expected)) == 0


@pytest.mark.exhaustive
def test_what_is_gathered_anew_is_quantized_anew(ranks: RankPool) -> None:
    """Codes that outlive the weights that FSDP frees would take the memory that this saves."""
    freed = config("blockwise", dict(dp_shard=2), rows=1)
    freed = replace(freed, parallel=replace(freed.parallel, **FREED["parallel"]))
    for _, calls in ranks.run(steps, 2, freed, True):
        assert calls == [4 * STEPS] * (LINEARS + 2)  # both passes of two micro-batches


def test_codes_end_with_the_passes_also_after_an_error() -> None:
    scaling = Tensorwise(torch.float8_e5m2)
    part = torch.nn.ModuleList([scaling])
    weight = torch.randn(4, 4)
    with pytest.raises(KeyError), weights_quantized_once([part], config("tensorwise")):  # type: ignore[list-item]
        first = scaling.quantize_weight(weight, scaling.weight_scales(weight))
        weight.mul_(3.0)
        assert scaling.quantize_weight(weight, scaling.weight_scales(weight)) is first
        raise KeyError
    changed = scaling.quantize_weight(weight, scaling.weight_scales(weight))
    assert scaling.cached is None and not torch.equal(changed.scales, first.scales)


def test_the_plan_counts_a_byte_a_kept_number() -> None:
    def gathered(**changes: Any) -> float:
        made = config("blockwise", dict(dp_shard=2), rows=1)
        made = replace(made, **{part: replace(getattr(made, part), **values) for part, values in changes.items()})
        shape = resolve_mesh(made.mesh, None)
        return plan_memory(made, shape, plan_batch(made, shape))[0].gathered_weights

    model = config("blockwise").model
    attention = 128 * 48 + 48 * 4 * 128 + 128 * (40 + 64) + 40 * 4 * 128 + 4 * 64 * 128
    numbers = 2 * attention + 3 * 128 * 256 + 3 * 128 * 256 * (1 + model.num_experts)
    assert gathered() == gathered(train=dict(fp8="off")) + numbers
    assert gathered(**FREED) == gathered(train=dict(fp8="off"), **FREED)
