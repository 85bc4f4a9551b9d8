"""Ranks killed by SIGKILL at every point of a save and of a resume: the run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_runs import Run, config, run

from automoe.verify.pool import RankError, RankPool

MESH = dict(dp_shard=2, ep=2)
UNTIL, SAVES = 4, (1, 2, 3)
# Point of the save of step 2 -> the step to go on from: the rename commits.
GOES_ON_FROM = {
    "save_begin": 1,
    "shard_write": 1,
    "shard_written": 1,
    "manifest_written": 1,
    "renamed": 2,
    "latest_written": 2,
    "save_end": 2,
}
ALL = [(rank, point) for point in GOES_ON_FROM for rank in ("0", "1", "all")]


@pytest.fixture(scope="module")
def straight(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody interrupts."""
    return run(ranks, config(text, **MESH), tmp_path_factory.mktemp("straight") / "run", UNTIL)


def killed(ranks: RankPool, text: Path, run_dir: Path, fault: str, async_save: bool = False) -> None:
    with pytest.raises(RankError) as death:
        run(ranks, config(text, async_save=async_save, **MESH), run_dir, UNTIL, SAVES, fault)
    assert death.value.kind == "died" and "exit code -9" in str(death.value)


def goes_on(ranks: RankPool, text: Path, run_dir: Path, after: int, straight: Run) -> None:
    resumed = run(ranks, config(text, **MESH), run_dir, UNTIL, SAVES)
    assert resumed.resumed_at == after and resumed.said == ""
    assert resumed.losses == straight.losses[after:]
    final, expected = resumed.states[UNTIL], straight.states[UNTIL]
    assert [name for name in expected if not torch.equal(final[name], expected[name])] == []
    steps = [f"step-{step}" for step in SAVES[-2:]]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["LATEST", *steps]


@pytest.mark.faults
@pytest.mark.parametrize(("rank", "point"), ALL)
def test_killed_in_a_save(ranks: RankPool, text: Path, tmp_path: Path, straight: Run, rank: str, point: str) -> None:
    killed(ranks, text, tmp_path / "run", f"kill:rank={rank}:at={point}:step=2")
    goes_on(ranks, text, tmp_path / "run", GOES_ON_FROM[point], straight)


@pytest.mark.faults
@pytest.mark.parametrize(("rank", "point"), [case for case in ALL if case[0] != "0"])
def test_killed_in_a_background_save(
    ranks: RankPool, text: Path, tmp_path: Path, straight: Run, rank: str, point: str
) -> None:
    killed(ranks, text, tmp_path / "run", f"kill:rank={rank}:at={point}:step=2", async_save=True)
    goes_on(ranks, text, tmp_path / "run", GOES_ON_FROM[point], straight)


@pytest.mark.faults
@pytest.mark.parametrize("point", ["resuming", "resumed"])
def test_killed_again_while_resuming(ranks: RankPool, text: Path, tmp_path: Path, straight: Run, point: str) -> None:
    killed(ranks, text, tmp_path / "run", "kill:rank=1:at=renamed:step=2")
    killed(ranks, text, tmp_path / "run", f"kill:rank=0:at={point}")
    killed(ranks, text, tmp_path / "run", f"kill:rank=all:at={point}:step=2")
    goes_on(ranks, text, tmp_path / "run", 2, straight)
