"""The pretraining loop step by step: what it skips, what it counts, and what may not change its numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretrain_runs import NOT_FINITE, Outcome, config, run
from tokenizers import Tokenizer, models

from automoe.errors import AutomoeError
from automoe.observe.metrics import last_objective
from automoe.run.run import Run
from automoe.verify.pool import RankPool


def unchanged(outcome: Outcome, step: int) -> list[bool]:
    """For each parameter, whether the step ``step``, counted from 1, left it as it was."""
    before, after = outcome.parameters[step - 1], outcome.parameters[step]
    return [torch.equal(before[name], after[name]) for name in before]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mesh", [dict(dp_shard=2, ep=2), dict(pp=2)], ids=["dp2-ep2", "pp2"])
@pytest.mark.parametrize("fault", NOT_FINITE)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    ranks: RankPool, tmp_path: Path, fault: str, mesh: dict[str, int]
) -> None:
    settings = config(tmp_path, steps=5, **mesh)
    settings.launch.probe_every = 2
    outcomes, records = run(ranks, settings, fault, at=(2, 3))
    for outcome in outcomes:
        assert not any(unchanged(outcome, 1)) and not any(unchanged(outcome, 4))
        assert all(unchanged(outcome, 2)) and all(unchanged(outcome, 3))
    assert [record["skipped"] for record in records] == [0, 1, 2, 0, 0]
    assert [math.isfinite(float(record["grad_norm"])) for record in records] == [True, False, False, True, True]
    struck = [float(record["loss"]) for record in records[1:3]]
    assert all(math.isnan(loss) for loss in struck) == (fault == "nan activation")
    assert [record["tokens"] for record in records] == [128, 256, 384, 512, 640]
    assert "step 2 skipped" in outcomes[0].said and "step 3 skipped" in outcomes[0].said
    assert math.isfinite(records[-1]["val_loss"])
    assert [record.get("slowest_rank") in (0, 1) for record in records] == [False, True, False, True, False]
    assert [record.get("skipped_rows") for record in records] == [None, [8, 15], [16, 23], None, None]
    assert f"rows 8-15 of the training data, from {tmp_path}/text.txt" in outcomes[0].said


def test_a_run_that_never_recovers_ends(ranks: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path, steps=20, dp_shard=2)
    settings.train.max_skipped = 3
    outcomes, records = run(ranks, settings, "nan activation", at=tuple(range(2, 20)))
    assert len(records) == 4
    for outcome in outcomes:
        assert "3 steps in a row were skipped" in outcome.error and "optim.lr" in outcome.error
        assert "the last step 4: loss nan" in outcome.error and "rows 24-31" in outcome.error


def test_a_run_whose_last_step_is_skipped_has_the_loss_of_the_one_before(ranks: RankPool, tmp_path: Path) -> None:
    """Its state is that of the last step that was taken, and so is its result; also when it is started again."""
    settings = config(tmp_path, steps=2)
    settings.train.val_every, settings.checkpoint.every = 0, 2
    (outcome,), records = run(ranks, settings, "nan activation", at=(2,))
    assert not outcome.error and len(records) == 2 and not math.isfinite(float(records[1]["loss"]))
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()
    assert last_objective(tmp_path / "run", 2) == records[0]["loss"]
    (outcome,), _ = run(ranks, settings)
    assert not outcome.error


def test_a_run_whose_last_loss_is_no_number_is_not_done(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=2)
    for objective in (math.nan, math.inf):
        over = SimpleNamespace(state=SimpleNamespace(step=2, tokens=1), config=settings, objective=objective)
        with pytest.raises(AutomoeError, match=f"reached step 2, but its last loss is {objective}: no result"):
            Run.check_result(over)  # type: ignore[arg-type]


def test_a_run_without_labels_is_not_done(ranks: RankPool, tmp_path: Path) -> None:
    """The tokenizer knows no letter of the text: documents are their end alone."""
    settings = config(tmp_path, steps=1)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(models.BPE({"<eos>": 0, "q": 1}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}'
    )
    path = tmp_path / "unknown.jsonl"
    path.write_text('{"text": "something"}\n' * 2000)
    more = dict(kind="jsonl", path=str(path), tokenizer=str(folder), val_fraction=0.0)
    settings.data, settings.train.val_every = replace(settings.data, **more), 0
    (outcome,), records = run(ranks, settings)
    assert records[0]["tokens"] == 0
    assert "reached step 1, and no token had a label" in outcome.error


@pytest.mark.exhaustive
def test_a_loss_spike_is_skipped_and_its_batch_named_also_right_after_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path, steps=8, pp=2)
    settings.train.spike_factor, settings.train.spike_window = 6.0, 4
    settings.optim.schedule = "constant"
    outcomes, straight = run(ranks, settings, "loss spike", at=(3, 7))
    # Step 3 has too little before it to be judged by, and counts as one of the four that step 7 is judged by.
    assert [record["skipped"] for record in straight] == [0, 0, 0, 0, 0, 0, 1, 0]
    for outcome in outcomes:
        assert all(unchanged(outcome, 7)) and not any(unchanged(outcome, 3))
    assert straight[6]["skipped_rows"] == [48, 55]
    assert straight[6]["skipped_documents"] == [f"{tmp_path}/text.txt"]
    assert "step 7 skipped: loss" in outcomes[0].said and "is a spike: above" in outcomes[0].said

    before, after = replace(settings, run_dir=str(tmp_path / "again")), replace(settings.train, steps=6)
    before.checkpoint.every = 6
    run(ranks, replace(before, train=after), "loss spike", at=(3,))
    outcomes, joined = run(ranks, before, "loss spike", at=(1,))
    assert [record["skip_reason"] for record in joined[6:7]] == [straight[6]["skip_reason"]]
    assert [record["loss"] for record in joined] == [record["loss"] for record in straight]


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


@pytest.mark.exhaustive
def test_a_growing_batch_trains_alike_on_meshes_and_goes_on_where_it_stopped(ranks: RankPool, tmp_path: Path) -> None:
    runs = []
    for number, (rows, mesh) in enumerate([(2, {}), (1, dict(dp_shard=2, ep=2)), (1, dict(pp=2))]):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = replace(config(tmp_path, 5, "float64", rows, **mesh), run_dir=str(folder / "run"))
        settings.optim.schedule, settings.checkpoint.every = "constant", 3
        settings.train.rampup_batch_size = [2, 2, 9]  # of 8 rows: 3 rows, then 2 more
        if not number:
            run(ranks, replace(settings, train=replace(settings.train, steps=3)))
        runs.append(run(ranks, settings)[1])
    assert [record["step"] for record in runs[0]] == [1, 2, 3, 4, 5]
    assert [record["tokens"] for record in runs[0]] == [32, 64, 128, 224, 352]
    for key in ("loss", "grad_norm", "tokens", "lr", "expert_max_load"):
        expected = [record[key] for record in runs[0]]
        for other in runs[1:]:
            assert [record[key] for record in other] == pytest.approx(expected, rel=1e-10)
