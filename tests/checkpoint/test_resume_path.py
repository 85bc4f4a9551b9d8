"""``checkpoint.resume=PATH``: a run that starts where another one is, and then is its own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_runs import Run, build_state, config, open_store, refusal, run

from automoe.config.schema import Config
from automoe.errors import CheckpointError
from automoe.verify.pool import RankPool


@pytest.fixture(scope="module")
def source(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run directory with checkpoints of steps 1 and 2 of dp2 x ep2, and what the run saw up to step 4."""
    run_dir = tmp_path_factory.mktemp("source") / "run"
    return run_dir, run(ranks, config(text, dp_shard=2, ep=2), run_dir, until=4, save_at=[1, 2])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def starting_from(settings: Config, path: Path) -> Config:
    return replace(settings, checkpoint=replace(settings.checkpoint, resume=str(path)))


@pytest.mark.exhaustive
def test_a_run_goes_on_from_another_and_then_from_itself(
    ranks: RankPool, text: Path, tmp_path: Path, source: tuple[Path, Run]
) -> None:
    """On another mesh; the directory that it came from is only read."""
    run_dir, original = source
    before = content(run_dir)
    settings = starting_from(config(text, dp_shard=2), run_dir)
    first = run(ranks, settings, tmp_path / "run", until=3, save_at=[3])
    assert first.resumed_at == 2 and first.said == ""
    assert first.losses == pytest.approx(original.losses[2:3], rel=1e-10)
    assert content(run_dir) == before
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["LATEST", "step-3"]
    second = run(ranks, settings, tmp_path / "run", until=4)
    assert second.resumed_at == 3
    assert "has its own checkpoints and goes on from step-3" in second.said
    assert second.losses == pytest.approx(original.losses[3:], rel=1e-10)


@pytest.mark.exhaustive
def test_a_step_of_another_run(ranks: RankPool, text: Path, tmp_path: Path, source: tuple[Path, Run]) -> None:
    run_dir, original = source
    settings = config(text, dp_shard=2, ep=2)
    branch = run(ranks, starting_from(settings, run_dir / "checkpoints" / "step-1"), tmp_path / "run", until=4)
    assert branch.resumed_at == 1 and branch.losses == original.losses[1:]
    final, expected = branch.states[4], original.states[4]
    assert [name for name in expected if not torch.equal(final[name], expected[name])] == []


@pytest.mark.exhaustive
def test_damage_there_is_said_and_left(ranks: RankPool, text: Path, tmp_path: Path, source: tuple[Path, Run]) -> None:
    damaged = shutil.copytree(source[0], tmp_path / "damaged")
    (shard, *_) = sorted((damaged / "checkpoints" / "step-2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    before = content(damaged)
    resumed = run(ranks, starting_from(config(text), damaged), tmp_path / "run", until=1)
    assert resumed.resumed_at == 1
    assert "checkpoints/step-2 is damaged" in resumed.said
    step = damaged / "checkpoints" / "step-2"
    (message,) = ranks.run(refusal, 1, starting_from(config(text), step), tmp_path / "other")
    assert f"checkpoint.resume={step} is damaged" in message and "Name another step" in message
    assert content(damaged) == before
    for shard in damaged.glob("checkpoints/*/*.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1])
    (message,) = ranks.run(refusal, 1, starting_from(config(text), damaged), tmp_path / "third")
    assert message.endswith("Restore one from a copy, or set another checkpoint.resume")


def own(settings: Config, run_dir: Path) -> tuple[bool, str]:
    """Whether the run resumes its own record, and what ``check`` says of its own step 1."""
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    resumed = store.load_latest(state)
    assert resumed is not None and resumed.step == state.step == 2
    itself = starting_from(settings, run_dir / "checkpoints" / "step-1")
    with pytest.raises(CheckpointError) as refused:
        open_store(itself, run_dir).check()
    return resumed.of_run, str(refused.value)


@pytest.mark.faults
def test_whose_record_goes_on(ranks: RankPool, text: Path, tmp_path: Path, source: tuple[Path, Run]) -> None:
    copy = shutil.copytree(source[0], tmp_path / "run")
    ((mine, refused),) = ranks.run(own, 1, config(text), copy)
    assert mine and "is a step of this run itself, and later ones would be lost" in refused
    state = ranks.run(resumed_from_elsewhere, 1, starting_from(config(text), copy), tmp_path / "new")
    assert state == [(2, False)]


def resumed_from_elsewhere(settings: Config, run_dir: Path) -> tuple[int, bool]:
    state, _, _ = build_state(settings, run_dir)
    resumed = open_store(settings, run_dir).load_latest(state)
    assert resumed is not None
    return resumed.step, resumed.of_run
