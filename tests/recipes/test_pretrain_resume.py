"""Whose record a resumed run writes, and what is found out before weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pretrain_runs import config, run

from automoe.config.schema import CheckpointConfig, Config
from automoe.observe.metrics import read_jsonl
from automoe.verify.pool import RankPool


def saving(settings: Config, run_dir: Path, **checkpoint: object) -> Config:
    keys = {"every": 2, "keep": 9, "export_hf": False} | checkpoint
    return replace(settings, run_dir=str(run_dir), checkpoint=CheckpointConfig(**keys))  # type: ignore[arg-type]


def test_a_run_that_starts_from_another_has_a_record_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path, steps=4)
    _, straight = run(ranks, saving(settings, tmp_path / "first"))
    assert [record["step"] for record in straight] == [1, 2, 3, 4]
    assert [record["checkpoint_share"] > 0 for record in straight] == [False, False, True, False]

    branch = saving(settings, tmp_path / "branch", resume=str(tmp_path / "first/checkpoints/step-2"), async_save=True)
    (tmp_path / "branch").mkdir()
    # Of an earlier attempt, killed before it had a checkpoint: steps that will be run again.
    (tmp_path / "branch" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    outcomes, record = run(ranks, branch)
    assert [outcome.error for outcome in outcomes] == [""]
    assert [line["step"] for line in record] == [3, 4]
    assert [line["loss"] for line in record] == [line["loss"] for line in straight[2:]]
    assert read_jsonl(tmp_path / "branch" / "metrics.1.jsonl") == [{"step": 1, "loss": 0.5}]
    assert sorted(path.name for path in (tmp_path / "branch" / "checkpoints").iterdir()) == ["LATEST", "step-4"]


def test_a_folder_that_cannot_be_written_is_found_before_weights_are_read(ranks: RankPool, tmp_path: Path) -> None:
    """The weights are not there at all, which nobody notices."""
    settings = saving(config(tmp_path, steps=2, dp_shard=2), tmp_path / "run")
    nowhere = replace(settings.model, hf_path=str(tmp_path / "nowhere"))
    settings = replace(settings, model=nowhere, data=replace(settings.data, tokenizer="byte"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    outcomes, _ = run(ranks, settings)
    for outcome in outcomes:
        assert "checkpoints cannot be written: File exists" in outcome.error


@pytest.mark.parametrize("export", [False, True])
def test_a_run_asked_to_stop_in_its_last_step_is_done_but_for_the_export(
    ranks: RankPool, tmp_path: Path, export: bool
) -> None:
    """What would be called done with exit status 0 nobody would start again, and the export would be missing."""
    settings = saving(config(tmp_path, steps=1), tmp_path / "run", export_hf=export)
    (outcome,), record = run(ranks, settings, stop=True)
    assert [line["step"] for line in record] == [1]
    assert outcome.preempted is export and not (tmp_path / "run" / "hf").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-1").is_dir()
