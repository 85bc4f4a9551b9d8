"""Which checkpoints stay."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from checkpoint_runs import build_state, config, open_store, refusal

from automoe.checkpoint.folder import superfluous
from automoe.checkpoint.manifest import damage
from automoe.config.schema import CheckpointConfig, Config
from automoe.verify.pool import RankPool
from tests.support.fault_points import faults

STEPS = [f"step-{n}" for n in (2, 4, 6, 8, 10, 12)]
LOSSES = dict(zip(STEPS, (5.0, 3.0, 4.0, 3.0, 9.0, 8.0), strict=True))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (dict(keep=2), [10, 12]),
        (dict(keep=1), [12]),
        (dict(keep=0), [12]),  # the newest always stays
        (dict(keep=9), [2, 4, 6, 8, 10, 12]),
        (dict(keep=1, keep_every=4), [4, 8, 12]),
        (dict(keep=2, keep_every=6), [6, 10, 12]),
        (dict(keep=1, keep_best=1), [8, 12]),  # of equal losses the newer
        (dict(keep=1, keep_best=3), [4, 6, 8, 12]),
        (dict(keep=1, keep_best=1, keep_every=6), [6, 8, 12]),
    ],
)
def test_rules(settings: dict[str, int], kept: list[int]) -> None:
    gone = superfluous(STEPS, LOSSES, CheckpointConfig(**settings))
    assert [name for name in STEPS if name not in gone] == [f"step-{n}" for n in kept]


def test_steps_without_a_validation_loss_are_no_best() -> None:
    gone = superfluous(STEPS, {"step-6": 4.0}, CheckpointConfig(keep=1, keep_best=2))
    assert [name for name in STEPS if name not in gone] == ["step-6", "step-12"]


def save_losses(settings: Config, run_dir: Path, losses: list[float]) -> list[list[str]]:
    """Save steps 1, 2, ... with these validation losses: the folder after each."""
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    folders = []
    for step, loss in enumerate(losses, 1):
        state.step = step
        store.save(state, loss)
        folders.append(sorted(path.name for path in store.folder.iterdir()))
    return folders


def test_the_best_is_kept_until_there_is_a_better_one(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text, keep=1)
    settings.checkpoint.keep_best = 1
    (folders,) = ranks.run(save_losses, 1, settings, tmp_path / "run", [3.0, 2.0, math.nan, 4.0, 1.0])
    assert folders == [
        ["LATEST", "step-1"],
        ["LATEST", "step-2"],
        ["LATEST", "step-2", "step-3"],
        ["LATEST", "step-2", "step-4"],
        ["LATEST", "step-5"],
    ]


def test_a_loss_that_is_no_number_is_never_the_best(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text, keep=1)
    settings.checkpoint.keep_best = 1
    (folders,) = ranks.run(save_losses, 1, settings, tmp_path / "run", [math.nan, 5.0, -math.inf, 6.0])
    assert folders == [
        ["LATEST", "step-1"],
        ["LATEST", "step-2"],
        ["LATEST", "step-2", "step-3"],
        ["LATEST", "step-2", "step-4"],
    ]


def save_in_a_streak(settings: Config, run_dir: Path, skipped: list[int]) -> list[list[str]]:
    """Save steps 1, 2, ... with that many steps skipped before each: the steps that are there after each."""
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    left = []
    for state.step, state.skipped in enumerate(skipped, 1):
        store.save(state)
        left.append(sorted(path.name for path in store.folder.glob("step-*")))
    return left


def test_what_is_saved_in_a_streak_of_skipped_steps_drives_nothing_out(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    (left,) = ranks.run(save_in_a_streak, 1, config(text, keep=1), tmp_path / "run", [0, 0, 1, 2, 0])
    assert left == [["step-1"], ["step-2"], ["step-2", "step-3"], ["step-2", "step-3", "step-4"], ["step-5"]]


def test_a_step_that_was_moved_and_linked_is_read_and_its_link_alone_is_deleted(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    run_dir, moved = tmp_path / "run", tmp_path / "other" / "moved"
    ranks.run(save_losses, 1, config(text), run_dir, [1.0, 2.0])
    moved.parent.mkdir()
    newest = run_dir / "checkpoints" / "step-2"
    newest.rename(moved)
    newest.symlink_to(moved)
    (run_dir / "checkpoints" / ".tmp-deleted-step-9").symlink_to(moved)  # a start would fail for ever on this one
    assert ranks.run(load, 1, config(text), run_dir) == [2]
    ranks.run(save_in_a_streak, 1, config(text, keep=1), run_dir, [0, 0, 0])
    assert sorted(path.name for path in newest.parent.iterdir()) == ["LATEST", "step-3"]
    assert damage(moved) is None


def test_a_link_whose_disk_is_away_is_no_damage(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ranks.run(save_losses, 1, config(text), run_dir, [1.0])
    link = run_dir / "checkpoints" / "step-2"
    link.symlink_to(tmp_path / "away")
    (said,) = ranks.run(refusal, 1, config(text), run_dir)
    assert f"{link} cannot be read: it is a link to {tmp_path}/away, which does not exist. It is left as it is" in said
    assert sorted(path.name for path in link.parent.iterdir()) == ["LATEST", "step-1", "step-2"]


def damage_what_was_just_written(settings: Config, run_dir: Path) -> tuple[list[str], int | None]:
    """Step 2 loses its end between LATEST and the deletion of step 1; then a new run resumes."""
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    state.step = 1
    store.save(state, None, stopping=True)
    release, latest = run_dir / "release", store.folder / "LATEST"
    with faults(f"hold:at=latest_written:until={release}"):
        state.step = 2
        store.save(state, None, stopping=False)
        while latest.read_text() != "step-2\n":
            time.sleep(0.01)
        (shard,) = (store.folder / "step-2").glob("*.distcp")
        os.truncate(shard, 1000)
        release.touch()
        store.poll(wait=True)
    left = sorted(path.name for path in store.folder.iterdir())
    state.step = 0
    resumed = store.load_latest(state)
    return left, resumed.step if resumed else None


def test_the_only_valid_checkpoint_is_never_deleted(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text, keep=1, async_save=True)
    ((left, resumed),) = ranks.run(damage_what_was_just_written, 1, settings, tmp_path / "run")
    assert left == ["LATEST", "step-1", "step-2"]
    assert resumed == 1


def test_a_deletion_that_was_cut_short_leaves_no_damaged_step(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """A killed run left step-1 half deleted, under the name that it has while it is deleted."""
    ranks.run(save_losses, 1, config(text), tmp_path / "run", [1.0, 2.0])
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-1").rename(folder / ".tmp-deleted-step-1")
    (folder / ".tmp-deleted-step-1" / "manifest.json").unlink()
    (folder / ".tmp-probe-0").write_text("")
    ranks.run(load, 1, config(text), tmp_path / "run")
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", "step-2"]


def load(settings: Config, run_dir: Path) -> int:
    state, _, _ = build_state(settings, run_dir)
    open_store(settings, run_dir).load_latest(state)
    return state.step
