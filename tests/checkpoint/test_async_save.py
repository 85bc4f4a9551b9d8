"""Saves in the background: training goes on, the state of the step is what is written, failures are heard of."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import build_state, config, open_store, run, run_ranks

from automoe.checkpoint.store import CheckpointStore
from automoe.config.schema import Config
from automoe.errors import CheckpointError
from automoe.verify.pool import RankError, RankPool
from tests.support.fault_points import faults

TWO = dict(dp_shard=2, ep=2)


def touch_before(path: Path, at: int, step: int, store: CheckpointStore) -> None:
    if step == at:
        path.touch()


@pytest.mark.exhaustive
def test_training_goes_on_while_the_state_of_the_step_is_written(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """The save of step 1 is held before its first byte until steps 2 and 3 have changed every tensor."""
    release, run_dir = tmp_path / "release", tmp_path / "run"
    settings = config(text, async_save=True, **TWO)
    seen = run_ranks(
        ranks,
        settings,
        run_dir,
        4,
        (1,),
        f"hold:at=save_begin:step=1:until={release}",
        partial(touch_before, release, 4),
    )
    assert all(rank.in_flight[:2] == [2, 3] for rank in seen)
    assert all([note.rsplit("/", 1)[1] for note in rank.notes] == ["step-1"] for rank in seen)
    saved = {name: tensor for rank in seen for name, tensor in rank.states[1].items()}
    resumed = run(ranks, settings, run_dir, 4)
    assert resumed.resumed_at == 1
    assert [name for name in saved if not torch.equal(resumed.states[1][name], saved[name])] == []
    assert resumed.losses == seen[0].losses[1:]


@pytest.mark.exhaustive
def test_one_save_is_in_flight_at_a_time(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """The save of step 1 takes a second; those of steps 2 and 3 wait, in order, and none is lost."""
    fault = "sleep:at=shard_written:step=1:seconds=1"
    seen = run_ranks(ranks, config(text, async_save=True, keep=3, **TWO), tmp_path / "run", 3, (1, 2, 3), fault)
    for rank in seen:
        assert [note.rsplit("/", 1)[1] for note in rank.notes] == ["step-1", "step-2", "step-3"]


def poll_until_over(text: Path, run_dir: Path, fault: str) -> tuple[int, list[str]]:
    """Begin a save that fails, and poll as a loop does at each step: number of polls, and warnings."""
    settings = config(text, async_save=True, dp_shard=2)
    state, _, _ = build_state(settings, run_dir)
    said: list[str] = []
    store = open_store(settings, run_dir)
    store.attach(said.append, said.append, lambda step_dir: None)
    with faults(fault):
        store.save(state, None, stopping=False)
        polls = 0
        while store.in_flight:
            time.sleep(0.05 * dist.get_rank())  # ranks do not come at the same time
            store.poll()
            polls += 1
    assert store.failures == len(said)
    return polls, said


@pytest.mark.exhaustive
def test_a_write_error_surfaces_in_the_same_poll_on_every_rank(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    outcomes = ranks.run(poll_until_over, 2, text, tmp_path / "run", "enospc:rank=1:at=shard_write")
    assert outcomes[0] == outcomes[1]
    ((_, (warning,)), _) = outcomes
    assert "of step 0 was not saved: No space left on device" in warning and "on rank 1" in warning
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def poll_around_a_save(text: Path, run_dir: Path) -> list[bool]:
    """Whether a poll says that a save is over, while it is over on rank 0 alone, and then on both."""
    store, save = open_store(config(text, dp_shard=2), run_dir), Future[Path]()
    store._in_flight = save
    told = []
    for rank in range(2):
        if dist.get_rank() == rank:
            save.set_result(run_dir)
        told.append(store.poll() is not None)
        assert store.in_flight is not told[-1]
    return told


def test_no_rank_goes_ahead_of_the_others(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    assert ranks.run(poll_around_a_save, 2, text, tmp_path / "run") == [[False, True]] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", ["shard_written", "manifest_written"])
def test_any_other_error_ends_the_run_on_every_rank(ranks: RankPool, text: Path, tmp_path: Path, point: str) -> None:
    """The peers do not wait for the rank that raised: each raises its error, with its number."""
    with pytest.raises(RankError, match=f"rank 1: InjectedFault: .*raise on rank 1 at {point}"):
        ranks.run(poll_until_over, 2, text, tmp_path / "run", f"raise:rank=1:at={point}")


@pytest.mark.exhaustive
def test_the_last_save_is_not_left_in_the_background(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text, async_save=True, **TWO)
    settings = replace(settings, train=replace(settings.train, steps=2))
    for in_flight in ranks.run(save_first_and_last, 2, settings, tmp_path / "run"):
        assert in_flight == [True, False, False]


def save_first_and_last(settings: Config, run_dir: Path) -> list[bool]:
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    in_flight = []
    for step, stopping in ((1, False), (2, False), (3, True)):
        state.step = step
        store.save(state, None, stopping)
        in_flight.append(store.in_flight)
    assert (run_dir / "checkpoints" / "step-3").is_dir()
    return in_flight


def record_costs(settings: Config, run_dir: Path) -> list[dict[str, Any]]:
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    records = [store.record(1.0)]
    release = run_dir / "release"
    with faults(f"hold:at=save_begin:until={release}"):
        store.save(state, None, stopping=False)
        records.append(store.record(1.0))
        release.touch()
        store.poll(wait=True)
    return [*records, store.record(1.0)]


def test_what_a_save_costs_the_loop_is_recorded(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ((before, during, after),) = ranks.run(record_costs, 1, config(text, async_save=True), tmp_path / "run")
    assert before == {
        "checkpoint_seconds": 0.0,
        "checkpoint_share": 0.0,
        "checkpoint_in_flight": False,
        "checkpoint_failures": 0,
    }
    assert during["checkpoint_in_flight"] and not after["checkpoint_in_flight"]
    for record in (during, after):
        blocked = record["checkpoint_seconds"]
        assert blocked > 0 and record["checkpoint_share"] == pytest.approx(blocked / (1 + blocked))
    never = replace(config(text), checkpoint=replace(config(text).checkpoint, every=0))
    assert ranks.run(record_nothing, 1, never, tmp_path / "run") == [{}]


def record_nothing(settings: Config, run_dir: Path) -> dict[str, Any]:
    return open_store(settings, run_dir).record(1.0)


def refusals(settings: Config, run_dir: Path) -> list[str]:
    """What ``check`` says where torch's stager is gone, and where it takes other arguments."""
    module, said = "torch.distributed.checkpoint._state_dict_stager", []
    other = mock.Mock(StateDictStager=lambda: None)
    for stager in (None, other):
        with mock.patch.dict(sys.modules, {module: stager}), pytest.raises(CheckpointError) as raised:
            open_store(settings, run_dir).check()
        said.append(str(raised.value))
        with mock.patch.dict(sys.modules, {module: stager}):
            waiting = replace(settings, checkpoint=replace(settings.checkpoint, async_save=False))
            open_store(waiting, run_dir).check()
    open_store(settings, run_dir).check()
    return said


def test_a_torch_without_its_stager_is_told_before_training(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    ((gone, changed),) = ranks.run(refusals, 1, config(text, async_save=True), tmp_path / "run")
    assert "StateDictStager" in gone and "Set checkpoint.async_save=false" in gone
    assert "unexpected keyword argument" in changed and "Set checkpoint.async_save=false" in changed
