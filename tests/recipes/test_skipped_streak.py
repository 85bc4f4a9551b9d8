"""A run that is stopped in a streak of skipped steps goes on in it: the streak is part of its state."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from pretrain_runs import config

from automoe.checkpoint.manifest import read_manifest
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.errors import AutomoeError
from automoe.training.context import RunContext
from recipes import pretrain
from tests.support.gpu import one_rank


def run(settings: Config) -> list[dict]:
    run_dir = Path(settings.run_dir)
    run_dir.mkdir(exist_ok=True)
    context = RunContext(0, 1, 0, torch.device("cpu"), run_dir)
    try:
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(run_dir.parent)), one_rank("cpu"):
            pretrain.main(settings, resolve_mesh(settings.mesh, 1), context)
    finally:
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return records


def test_the_streak_goes_on_where_the_run_was_stopped(tmp_path: Path) -> None:
    """The second step moves every weight so far that no later loss is finite; six skipped steps in a row end a run."""
    settings = config(tmp_path, steps=4)
    settings.train.max_skipped, settings.train.val_every = 6, 0
    settings.train.spike_factor, settings.train.spike_window = 50.0, 3
    settings.optim.schedule, settings.optim.warmup_steps, settings.optim.lr = "constant", 0, 1e30
    settings.checkpoint.every, settings.checkpoint.keep = 4, 9
    first = run(settings)
    assert [record["skipped"] for record in first] == [0, 1, 2, 3]
    counters = read_manifest(tmp_path / "run" / "checkpoints" / "step-4")[0]["counters"]
    assert counters["skipped"] == 3 and len(counters["recent_losses"]) == 1

    longer = replace(settings, train=replace(settings.train, steps=20))
    with pytest.raises(AutomoeError, match=r"6 steps in a row were skipped \(train.max_skipped\), the last step 7"):
        run(longer)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[:4] == first, "clocks and all: these steps were not run again"
    assert [record["skipped"] for record in records] == [0, 1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [128 * step for step in range(1, 8)]
