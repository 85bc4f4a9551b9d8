"""A run on synthetic ids: it trains, validates and goes on as any other, and has no bits per byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pretrain_runs import config
from test_skipped_streak import run

from automoe.config.data_schema import DataConfig


@pytest.mark.exhaustive
def test_synthetic_ids_train_validate_and_go_on_where_they_were(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=4)
    settings.data, settings.checkpoint.every = DataConfig(kind="benchmark"), 2
    settings.optim.schedule = "constant"
    straight = run(replace(settings, run_dir=str(tmp_path / "straight")))
    assert straight[-1]["val_loss"] > 0 and "val_bits_per_byte" not in straight[-1]
    run(replace(settings, train=replace(settings.train, steps=2)))
    joined = run(settings)
    assert [record["loss"] for record in joined] == [record["loss"] for record in straight]
    assert joined[-1]["val_loss"] == straight[-1]["val_loss"]
