"""What skipped steps and the clock do to saves; runs that skip to their end, and resumes in vain, are given up."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pretrain_runs import config

from automoe.checkpoint import store as checkpoint_store
from automoe.checkpoint.manifest import read_manifest
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.metrics import is_taken
from automoe.config.schema import Config
from automoe.errors import AutomoeError
from automoe.run import run as training_run
from automoe.run.run import Run
from automoe.training import step
from automoe.training.context import RunContext
from recipes import pretrain
from tests.support.gpu import one_rank


def run(settings: Config, fails: str = "", fell_back: int = 0, rank: int = 0) -> list[dict]:
    """The record of a run that ends well, or as ``fails`` says, after it gave up that many checkpoints."""
    run_dir = Path(settings.run_dir)
    run_dir.mkdir(exist_ok=True)
    context = RunContext(rank, 1, 0, torch.device("cpu"), run_dir)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(run_dir.parent)), one_rank("cpu"):
        with pytest.raises(AutomoeError, match=fails) if fails else nullcontext():
            pretrain.main(settings, resolve_mesh(settings.mesh, 1), context)
    assert len(context.fell_back) == fell_back, context.fell_back
    log = run_dir / "metrics.jsonl"  # of rank 0 alone
    return [json.loads(line) for line in log.read_text().splitlines()] if rank == 0 else []


def checkpoints(settings: Config) -> list[str]:
    return sorted(path.name for path in (Path(settings.run_dir) / "checkpoints").iterdir())


@pytest.mark.exhaustive
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
    records = run(longer, r"6 steps in a row were skipped \(train.max_skipped\), the last step 7")
    assert records[:4] == first, "clocks and all: these steps were not run again"
    assert [record["skipped"] for record in records] == [0, 1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [128 * step for step in range(1, 8)]


def test_a_run_without_one_step_that_was_taken_is_not_done(tmp_path: Path) -> None:
    """Also where its last loss is a number, as of a validation."""
    settings = config(tmp_path, steps=3)
    settings.model, settings.checkpoint.every = replace(settings.model, initializer_range=1e30), 1
    records = run(settings, "3 steps were skipped, and none was taken, the last step 3: loss .*, gradient norm nan")
    assert [record["skipped"] for record in records] == [1, 2, 3]
    assert checkpoints(settings) == []


@pytest.mark.faults
def test_a_resume_that_skips_again_falls_back_and_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Step 3 moves every weight far out: it and what follows are finite in every number, and worth nothing."""
    settings = config(tmp_path, steps=6)
    settings.train.val_every, settings.train.max_skipped = 0, 2
    settings.optim.schedule, settings.optim.warmup_steps = "constant", 0
    straight = run(replace(settings, run_dir=str(tmp_path / "straight")))

    settings.checkpoint.every, settings.checkpoint.keep = 1, 9
    far = replace(settings, optim=replace(settings.optim, lr=1e30))
    run(replace(settings, train=replace(settings.train, steps=2)))
    run(replace(far, train=replace(settings.train, steps=4)))
    assert checkpoints(settings) == ["LATEST", "step-1", "step-2", "step-3", "step-4"]
    joined = run(settings, fell_back=2)
    assert checkpoints(settings)[:3] == ["LATEST", "diverged-step-3.1", "diverged-step-4.1"]
    assert [record["step"] for record in joined] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in joined] == [record["loss"] for record in straight]

    nothing_left = replace(settings, train=replace(settings.train, steps=9))
    for name in checkpoints(settings):
        if name not in ("LATEST", "step-5", "step-6"):
            shutil.rmtree(tmp_path / "run" / "checkpoints" / name)
    with mock.patch.object(step, "reason_to_skip", lambda *_: "for no reason"):
        run(nothing_left, "2 steps in a row .* given up before: no step from 7 to 8 could be taken", fell_back=1)
    assert checkpoints(settings) == ["LATEST", "diverged-step-6.1", "step-5"]


def test_a_skipped_step_is_not_saved_as_the_newest(tmp_path: Path) -> None:
    """The next one that is taken is saved in its place."""
    settings = config(tmp_path, steps=6)
    settings.train.val_every, settings.checkpoint.every, settings.checkpoint.keep = 0, 2, 9
    judge = step.reason_to_skip
    losses = iter(range(1, 7))

    def skip_two(*facts: object) -> str | None:
        return "of this number" if next(losses) in (2, 3) else judge(*facts)

    with mock.patch.object(step, "reason_to_skip", skip_two):
        records = run(settings)
    assert [record["skipped"] for record in records] == [0, 1, 2, 0, 0, 0]
    assert checkpoints(settings) == ["LATEST", "step-4", "step-6"]
    losses = iter(range(1, 7))
    other = replace(settings, run_dir=str(tmp_path / "other"))
    other.checkpoint.every = 3
    with mock.patch.object(step, "reason_to_skip", skip_two):
        run(other)
    assert checkpoints(other) == ["LATEST", "step-4", "step-6"]


def test_what_a_fall_back_returns_to_is_not_saved_again(tmp_path: Path) -> None:
    """Nor the step after it: saves stay at the steps that ``checkpoint.every`` names."""
    settings = config(tmp_path, steps=6)
    settings.train.val_every, settings.train.max_skipped = 0, 2
    settings.checkpoint.every, settings.checkpoint.keep = 2, 9
    run(replace(settings, train=replace(settings.train, steps=4)))
    skips = iter((True, True))
    with mock.patch.object(step, "reason_to_skip", lambda *_: "of this number" if next(skips, False) else None):
        run(settings, fell_back=1)
    assert checkpoints(settings) == ["LATEST", "diverged-step-4.1", "step-2", "step-4", "step-6"]


def test_a_step_in_a_folder_of_another_name_is_given_up_too(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=6)
    settings.train.val_every, settings.train.max_skipped = 0, 2
    settings.checkpoint.every, settings.checkpoint.keep = 2, 9
    run(replace(settings, train=replace(settings.train, steps=4)))
    folder = Path(settings.run_dir) / "checkpoints"
    (folder / "step-4").rename(folder / "step-9")
    skips = iter((True, True))
    with mock.patch.object(step, "reason_to_skip", lambda *_: "of this number" if next(skips, False) else None):
        run(settings, fell_back=1)
    assert checkpoints(settings) == ["LATEST", "diverged-step-9.1", "step-2", "step-4", "step-6"]


@pytest.mark.exhaustive
def test_a_save_that_falls_due_before_the_first_step_taken_after_a_resume_is_made_up_for(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=6)
    settings.train.val_every, settings.checkpoint.every, settings.checkpoint.keep = 0, 2, 9
    settings.launch.probe_every = 1
    run(replace(settings, train=replace(settings.train, steps=3)))
    skips = iter((True, False, False))
    with mock.patch.object(step, "reason_to_skip", lambda *_: "of this number" if next(skips) else None):
        records = run(settings)
    assert [record["skipped"] for record in records] == [0, 0, 0, 1, 0, 0]
    assert checkpoints(settings) == ["LATEST", "step-2", "step-3", "step-5", "step-6"]
    assert all(is_taken(key) for record in records for key in record), "no number of a plugin may have these names"


def by_the_clock(settings: Config, rank: int = 0) -> list[str]:
    """What is saved by a run whose steps take a minute each, on the clock of ``rank``."""
    now = 0.0

    def begin_step(self: Run) -> None:
        nonlocal now
        now += 60
        begun(self)

    begun, clock = Run.begin_step, SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: now)
    with mock.patch.object(checkpoint_store, "time", clock), mock.patch.object(Run, "begin_step", begin_step):
        run(settings, rank=rank)
    return checkpoints(settings)


@pytest.mark.exhaustive
def test_minutes_are_counted_from_the_save_before_by_rank_0(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=6)
    settings.train.val_every, settings.checkpoint.every_minutes, settings.checkpoint.keep = 0, 2, 9
    settings.checkpoint.every = 3  # whichever comes first
    assert by_the_clock(settings) == ["LATEST", "step-2", "step-3", "step-5", "step-6"]
    longer = replace(settings, train=replace(settings.train, steps=9), checkpoint=replace(settings.checkpoint, every=0))
    assert by_the_clock(longer)[5:] == ["step-8", "step-9"], "a resume starts the clock anew"
    other = replace(longer, run_dir=str(tmp_path / "other"), train=replace(longer.train, steps=3))
    assert by_the_clock(other, rank=1) == ["LATEST", "step-3"], "another rank's clock saves nothing"


def test_minutes_that_are_up_in_a_skipped_step_save_the_next_one_taken(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=6)
    settings.train.val_every, settings.checkpoint.every_minutes, settings.checkpoint.keep = 0, 2, 9
    losses = iter(range(1, 7))
    with mock.patch.object(step, "reason_to_skip", lambda *_: "of this number" if next(losses) in (2, 3) else None):
        assert by_the_clock(settings) == ["LATEST", "step-4", "step-6"]


def test_a_step_takes_two_exchanges_of_all_ranks_and_garbage_goes_at_steps_of_its_own(tmp_path: Path) -> None:
    """Its statistics, and all that is agreed on: whether it is skipped, stop, save, memory. The first asks for the memory
    again, after the update that makes the optimizer's moments."""
    settings, calls = config(tmp_path, steps=3), 0
    settings.train.val_every, settings.checkpoint.every_minutes, settings.launch.gc_every = 0, 1e-9, 2
    collected: list[tuple[int, bool]] = []

    def count(tensor: torch.Tensor, *args: object, group: object = None, **kwargs: object) -> object:
        nonlocal calls
        calls += group is None
        return exchanged(tensor, *args, group=group, **kwargs)

    exchanged = dist.all_reduce

    def collect(*ages: int) -> None:
        collected.extend((age, gc.isenabled()) for age in ages)  # others collect everything, afterwards

    collecting = mock.patch.object(gc, "collect", collect)
    waits: list[int] = []
    waiting = mock.patch.object(training_run, "set_collective_timeouts", waits.append)
    measured = itertools.count(1)
    measuring = mock.patch.object(training_run, "_peak_memory_bytes", lambda device: next(measured))
    with mock.patch.object(dist, "all_reduce", count), collecting, waiting, measuring:
        records = run(settings)
    assert [record["peak_memory_bytes"] for record in records] == [2, 3, 4]
    assert waits == [settings.launch.timeout_s, settings.launch.init_timeout_s]
    assert calls == 2 * settings.train.steps + 1
    assert collected == [(1, False), (1, False)] and gc.isenabled(), "before steps 1 and 3 alone"
