"""The pretraining loop step by step: what it skips, what it counts, and what may not change its numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretrain_runs import FAULTS, Outcome, config, run

from automoe.recipes.pretrain import MAX_SKIPPED
from automoe.testing.pool import RankPool


def unchanged(outcome: Outcome, step: int) -> list[bool]:
    """For each parameter, whether the step ``step``, counted from 1, left it as it was."""
    before, after = outcome.parameters[step - 1], outcome.parameters[step]
    return [torch.equal(before[name], after[name]) for name in before]


@pytest.mark.parametrize("mesh", [dict(dp_shard=2, ep=2), dict(pp=2)], ids=["dp2-ep2", "pp2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    ranks: RankPool, tmp_path: Path, fault: str, mesh: dict[str, int]
) -> None:
    outcomes, records = run(ranks, config(tmp_path, steps=5, **mesh), fault, at=(2, 3))
    for outcome in outcomes:
        assert not any(unchanged(outcome, 1)) and not any(unchanged(outcome, 4))
        assert all(unchanged(outcome, 2)) and all(unchanged(outcome, 3))
    assert [record["skipped"] for record in records] == [0, 1, 2, 0, 0]
    assert [math.isfinite(float(record["grad_norm"])) for record in records] == [
        True,
        False,
        False,
        True,
        True,
    ]
    struck = [float(record["loss"]) for record in records[1:3]]
    assert all(math.isnan(loss) for loss in struck) == (fault == "nan activation")
    assert [record["tokens"] for record in records] == [128, 256, 384, 512, 640]
    assert "step 2 skipped" in outcomes[0].said and "step 3 skipped" in outcomes[0].said
    assert math.isfinite(records[-1]["val_loss"])


def test_a_run_that_never_recovers_ends(ranks: RankPool, tmp_path: Path) -> None:
    steps = tuple(range(2, MAX_SKIPPED + 2))
    outcomes, records = run(ranks, config(tmp_path, steps=20, dp_shard=2), "nan activation", at=steps)
    assert len(records) == MAX_SKIPPED + 1
    for outcome in outcomes:
        assert f"{MAX_SKIPPED} steps in a row" in outcome.error and "optim.lr" in outcome.error


def test_accumulation_and_data_parallelism_change_nothing(ranks: RankPool, tmp_path: Path) -> None:
    runs = []
    for number, (rows, mesh) in enumerate([(8, {}), (1, {}), (2, dict(dp_shard=2, ep=2))]):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = config(tmp_path, 4, "float64", rows, **mesh)
        runs.append(run(ranks, replace(settings, run_dir=str(folder / "run")))[1])
    for key in ("loss", "grad_norm", "seq_balance_loss", "tokens", "lr", "expert_max_load"):
        expected = [record[key] for record in runs[0]]
        assert len(expected) == 4 and all(value > 0 for value in expected)
        for other in runs[1:]:
            assert [record[key] for record in other] == pytest.approx(expected, rel=1e-10)
    for key in ("val_loss", "val_bits_per_byte"):
        assert [other[-1][key] for other in runs] == pytest.approx([runs[0][-1][key]] * 3, rel=1e-10)
