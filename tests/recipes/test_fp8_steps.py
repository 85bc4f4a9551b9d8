"""Delayed scales in the pretraining loop: what they remember of steps that are done, skipped or only evaluate."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pretrain_runs import config, run_rank

from automoe.config.schema import Config
from automoe.parallel.fp8 import update_scales
from automoe.quantize.scaling import Delayed, X
from automoe.training import step
from automoe.verify.pool import RankPool


def remembered(settings: Config, at: tuple[int, ...]) -> list[torch.Tensor]:
    """After each step of a run whose last rank makes NaN in the steps ``at``: every history of this rank."""
    after: list[torch.Tensor] = []

    def update(parts, meshes, stepped: bool) -> float:
        parts = list(parts)
        clipped = update_scales(parts, meshes, stepped)
        scalings = [module for part in parts for module in part.modules() if isinstance(module, Delayed)]
        assert not any(scaling.seen.any() for scaling in scalings)
        after.append(torch.stack([scaling.history for scaling in scalings]))
        return clipped

    with mock.patch.object(step, "update_scales", update):
        outcome = run_rank(settings, "nan activation", at, stop=False)
    assert outcome.error == ""
    return after


@pytest.mark.exhaustive
def test_a_skipped_step_is_forgotten_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path, steps=4, dp_shard=2, ep=2)
    settings = replace(
        settings,
        model=replace(settings.model, moe_intermediate_size=16),
        train=replace(settings.train, fp8="delayed", val_every=1),
    )
    Path(settings.run_dir).mkdir()
    mine, others = ranks.run(remembered, 2, settings, (2,))
    assert len(mine) == 4 and mine[0].shape[1:] == (3, 16)
    for here, there in zip(mine, others, strict=True):
        assert torch.equal(here, there) and math.isfinite(float(here.sum()))
    first, second, third, fourth = mine
    assert (first[..., 0] > 0).all() and not first[..., 1:].any()
    assert torch.equal(second, first)
    assert torch.equal(third[..., 1], first[..., 0]) and not third[..., 2:].any()
    assert torch.equal(fourth[..., 1:3], third[..., :2])


def one_scale_too_small(settings: Config) -> int:
    """A run of which, after its first step, no history is too small but one of the last rank's; this rank's scales."""
    found: list[Delayed] = []

    def update(parts, meshes, stepped: bool) -> float:
        parts = list(parts)
        clipped = update_scales(parts, meshes, stepped)
        found[:] = [module for part in parts for module in part.modules() if isinstance(module, Delayed)]
        for scaling in found:
            scaling.history.fill_(1e9)
        if dist.get_rank() == dist.get_world_size() - 1:
            found[0].history[X] = 1e-3
        return clipped

    with mock.patch.object(step, "update_scales", update):
        outcome = run_rank(settings, "", (), stop=False)
    assert outcome.error == ""
    return 3 * len(found)


def test_a_scale_that_is_too_small_is_in_the_record_whichever_stage_has_it(ranks: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path, steps=2, pp=2)
    settings = replace(
        settings, model=replace(settings.model, moe_intermediate_size=16), train=replace(settings.train, fp8="delayed")
    )
    Path(settings.run_dir).mkdir()
    _, scales = ranks.run(one_scale_too_small, 2, settings)
    first, second = map(json.loads, (Path(settings.run_dir) / "metrics.jsonl").read_text().splitlines())
    assert first["fp8_clipped_share"] == 0
    assert second["fp8_clipped_share"] == pytest.approx(1 / scales)
