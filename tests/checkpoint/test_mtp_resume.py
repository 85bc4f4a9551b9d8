"""A run with modules for multi-token prediction: killed, resumed to the bit, and both copies of its embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import config, run, run_ranks

from automoe.config.layout import with_layout
from automoe.config.schema import Config
from automoe.config.train_schema import Phase
from automoe.verify.pool import RankError, RankPool
from tests.support.releases import HALVES, needs

UNTIL, SAVES = 4, (1, 2, 3)


def with_modules(text: Path, **mesh: int) -> Config:
    """The modules' loss weighs less in the second phase, which a run that was killed meets after it has gone on."""
    plain = config(text, "float32", **mesh)
    phases = [Phase(2, mtp_loss_weight=0.3), Phase(198, mtp_loss_weight=0.1)]
    optim = replace(plain.optim, schedule="phases", phases=phases)
    return replace(plain, model=replace(plain.model, num_mtp_layers=2), optim=optim)


def in_float64(text: Path, **model: Any) -> Config:
    narrow = with_modules(text)
    return replace(
        narrow,
        model=replace(narrow.model, **model),
        moe=replace(narrow.moe, experts="loop"),
        train=replace(narrow.train, dtype="float64"),
    )


@pytest.mark.faults
def test_a_killed_run_goes_on_to_the_bit(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = with_modules(text, pp=2, dp_shard=2, ep=2)
    settings = replace(settings, moe=replace(settings.moe, dispatch_dtype="fp8"))
    straight = run(ranks, settings, tmp_path / "straight", UNTIL)
    with pytest.raises(RankError, match="exit code -9"):
        run(ranks, settings, tmp_path / "run", UNTIL, SAVES, "kill:rank=3:at=shard_write:step=2")
    resumed = run(ranks, settings, tmp_path / "run", UNTIL, SAVES)
    assert resumed.resumed_at == 1 and resumed.losses == straight.losses[1:]
    final, expected = resumed.states[UNTIL], straight.states[UNTIL]
    assert any("layers.5.eh_proj" in name for name in expected)
    assert [name for name in expected if not torch.equal(final[name], expected[name])] == []


@pytest.mark.exhaustive
def test_both_stages_keep_the_same_embedding_and_moments(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    stages = run_ranks(ranks, with_modules(text, pp=2, dp_shard=2, ep=2), tmp_path / "run", UNTIL, SAVES)
    first, last = stages[0], stages[2]
    for step in SAVES:
        held = {name for name in first.states[step] if name.endswith("embed_tokens.weight")}
        assert len(held) == 5  # the weight, two moments and their step, an average
        assert all(torch.equal(first.states[step][name], last.states[step][name]) for name in held)
    moved = first.states[SAVES[-1]]["model.embed_tokens.weight"] - first.states[0]["model.embed_tokens.weight"]
    assert moved.norm() > 0


@pytest.mark.exhaustive
def test_another_mesh_goes_on(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = in_float64(text)
    straight = run(ranks, settings, tmp_path / "straight", UNTIL)
    on_pipeline = with_modules(text, pp=2, tp=2)
    on_pipeline = replace(settings, mesh=on_pipeline.mesh)
    run(ranks, on_pipeline, tmp_path / "run", 2, [2])
    resumed = run(ranks, settings, tmp_path / "run", UNTIL)
    assert resumed.resumed_at == 2
    assert resumed.losses == pytest.approx(straight.losses[2:], rel=1e-10)


def apart(settings: Config, layout: str, schedule: str) -> Config:
    parallel = replace(settings.parallel, layout=layout, schedule=schedule)
    return with_layout(replace(settings, parallel=parallel))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
def test_modules_away_from_the_head_go_on(ranks: RankPool, text: Path, tmp_path: Path, tied: bool) -> None:
    """To the bit on the same mesh. Stages of both ranks hold copies of the embedding, those of the first two each."""
    plain = with_modules(text, pp=2, dp_shard=2, ep=2)
    plain = replace(
        plain, model=replace(plain.model, tie_embeddings=tied), optim=replace(plain.optim, algorithm="muon")
    )
    settings = apart(plain, "Ett|tt|m|mL", "Interleaved1F1B")
    straight = run(ranks, settings, tmp_path / "straight", UNTIL)
    run(ranks, settings, tmp_path / "run", 2, [1, 2])
    stages = run_ranks(ranks, settings, tmp_path / "run", UNTIL)
    assert stages[0].resumed_at == 2 and stages[0].losses == straight.losses[2:]
    for rank in stages:
        expected = straight.states[UNTIL]
        assert [name for name, found in rank.states[UNTIL].items() if not torch.equal(found, expected[name])] == []
    assert all("model.embed_tokens.weight" in rank.states[UNTIL] for rank in stages)


@needs(HALVES)
@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
def test_another_layout_goes_on(ranks: RankPool, text: Path, tmp_path: Path, tied: bool) -> None:
    one = in_float64(text, tie_embeddings=tied)
    straight = run(ranks, one, tmp_path / "straight", UNTIL)
    two = replace(one, mesh=with_modules(text, pp=2).mesh)
    losses = list(run(ranks, one, tmp_path / "run", 1, [1]).losses)
    down_and_up = apart(two, "Ett|ttm|m|L", "ZBVZeroBubble")
    for step, settings in ((2, down_and_up), (3, apart(two, "Ettttmm|L", "1F1B")), (4, one)):
        went_on = run(ranks, settings, tmp_path / "run", step, [step])
        assert went_on.resumed_at == step - 1
        losses += went_on.losses
    assert losses == pytest.approx(straight.losses, rel=1e-10)


@needs(HALVES)
@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
def test_another_schedule_goes_on(ranks: RankPool, text: Path, tmp_path: Path, tied: bool) -> None:
    """From one rank to both copies of the embedding on one rank, to one on each, and back."""
    one = in_float64(text, tie_embeddings=tied, num_mtp_layers=0 if tied else 1)
    straight = run(ranks, one, tmp_path / "straight", UNTIL)
    down_and_up = replace(one.parallel, schedule="ZBVZeroBubble", stages_per_rank=2)
    in_turn = replace(one.parallel, schedule="Interleaved1F1B", stages_per_rank=2)
    mesh = with_modules(text, pp=2).mesh
    losses = list(run(ranks, one, tmp_path / "run", 1, [1]).losses)
    for step, parallel in ((2, down_and_up), (3, in_turn), (4, down_and_up)):
        went_on = run(ranks, replace(one, mesh=mesh, parallel=parallel), tmp_path / "run", step, [step])
        assert went_on.resumed_at == step - 1
        losses += went_on.losses
    assert losses == pytest.approx(straight.losses, rel=1e-10)
