"""Merged passes: who runs when, what is hidden, and what becomes of errors. That they compute the same: tests/mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_cases import Case, batches
from mesh_mappings import DELAYED, DUAL_PIPE, INTERLEAVED, MERGED

from automoe.moe.gradient_sums import GradientSums
from automoe.parallel import overlap
from automoe.parallel.overlap import BACKWARD_THREAD, MergedPasses
from automoe.verify.pool import RankError, RankPool
from automoe.verify.trajectory import Trajectory
from tests.support.trajectories import run_trajectory

ALONE = Case("deepseek", dict(dp_shard=2, ep=2), rows=1, parallel=MERGED)
STAGES = Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | MERGED)
DOWN_AND_UP = replace(STAGES, parallel=DUAL_PIPE | MERGED)
LATER = replace(STAGES, parallel=INTERLEAVED | DELAYED)

Event = tuple[str, str, int]  # pass, what it does, which of its all-to-alls


def steps_of(turns: MergedPasses, log: list[str], name: str, count: int) -> Callable[[], str]:
    def run() -> str:
        for step in range(count):
            log.append(f"{name}{step}")
            turns.swap()
        return name

    return run


def test_passes_alternate_and_the_longer_one_ends_alone() -> None:
    turns, log = MergedPasses(), list[str]()
    assert turns.run(steps_of(turns, log, "B", 2), steps_of(turns, log, "F", 4)) == "F"
    assert log == ["B0", "F0", "B1", "F1", "F2", "F3"]
    turns.swap()  # outside of run, nothing happens
    assert turns.run(steps_of(turns, log, "B", 3), steps_of(turns, log, "F", 0)) == "F"
    assert log[6:] == ["B0", "B1", "B2"]


@pytest.mark.parametrize("which", ["first", "second"])
def test_an_error_of_one_pass_ends_the_other_where_it_stands(which: str) -> None:
    turns, log = MergedPasses(), list[str]()

    def fails() -> None:
        turns.defer(partial(log.append, "of a step that failed"))
        turns.swap()
        raise ZeroDivisionError("of this pass")

    longer = steps_of(turns, log, "x", 1000)
    passes = (fails, longer) if which == "first" else (longer, fails)
    with pytest.raises(ZeroDivisionError, match="of this pass"):
        turns.run(*passes)
    assert len(log) <= 3
    assert BACKWARD_THREAD not in [thread.name for thread in threading.enumerate()]
    turns.check_nothing_is_deferred()
    assert turns.run(steps_of(turns, log, "B", 1), steps_of(turns, log, "F", 1)) == "F"  # it can be used again


def test_a_thread_that_cannot_begin_ends_the_other_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise RuntimeError("no such number of threads")

    turns, log = MergedPasses(), list[str]()
    monkeypatch.setattr(torch, "set_num_threads", fails)
    with pytest.raises(RuntimeError, match="no such number"):
        turns.run(steps_of(turns, log, "B", 1), steps_of(turns, log, "F", 1))
    assert not log


def logged(case: Case, steps: int) -> tuple[list[Event], Trajectory]:
    """The all-to-alls of one rank's steps in order, and what it trained. On a rank of ``case``."""
    log, begun = list[Event](), {"F": 0, "B": 0}
    issue, multiply = dist.all_to_all_single, GradientSums._add

    class Logged:
        def __init__(self, work: dist.Work, number: int) -> None:
            self.work, self.number = work, number

        def wait(self) -> None:
            log.append((who(), "waits for", self.number))
            self.work.wait()

    def who() -> str:
        return "B" if threading.current_thread().name == BACKWARD_THREAD else "F"

    def logging_issue(*args: Any, **kwargs: Any) -> Any:
        work = issue(*args, **kwargs)
        if not kwargs.get("async_op"):
            return work
        number, begun[who()] = begun[who()], begun[who()] + 1
        log.append((who(), "issues", number))
        return Logged(work, number)

    def logging_multiply(*args: Any) -> None:
        log.append((who(), "adds products", begun[who()] - 1))
        multiply(*args)

    overlap.dist.all_to_all_single = logging_issue
    GradientSums._add = logging_multiply  # type: ignore[method-assign]
    try:
        return log, run_trajectory(case.config, batches, steps)
    finally:
        overlap.dist.all_to_all_single = issue
        GradientSums._add = multiply  # type: ignore[method-assign]


def hidden(log: list[Event]) -> int:
    """How many all-to-alls have something of the other pass between their issue and their wait."""
    found = 0
    for place, (one, what, number) in enumerate(log):
        if what == "issues":
            end = log.index((one, "waits for", number), place)
            found += any(other != one for other, _, _ in log[place:end])
    return found


def test_deferred_work_is_done_once_in_its_order_and_none_is_forgotten() -> None:
    turns, log = MergedPasses(), list[str]()
    for name in "ab":
        turns.defer(partial(log.append, name))
    with pytest.raises(AssertionError, match="2 deferred products were not computed"):
        turns.check_nothing_is_deferred()
    turns.run_deferred()
    turns.run_deferred()
    turns.check_nothing_is_deferred()
    assert log == ["a", "b"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "share"),
    # Passes that warm up or drain a pipeline have no other to hide behind.
    [
        (ALONE, 0.7),
        pytest.param(STAGES, 0.35, marks=pytest.mark.exhaustive),
        pytest.param(DOWN_AND_UP, 0.35, marks=pytest.mark.exhaustive),
        pytest.param(LATER, 0.35, marks=pytest.mark.exhaustive),
    ],
    ids=["one stage", "interleaved", "DualPipeV", "delayed products"],
)
def test_the_other_pass_computes_between_issue_and_wait_in_the_same_order_each_time(
    ranks: RankPool, case: Case, share: float
) -> None:
    runs = [ranks.run(logged, case.world_size, case, 1) for _ in range(2)]
    for (log, trained), (again, trained_again) in zip(*runs, strict=True):
        assert log == again
        assert trained.losses == trained_again.losses
        for step, gradients in enumerate(trained.gradients):
            for name, gradient in gradients.items():
                assert torch.equal(gradient, trained_again.gradients[step][name]), name
        issued = sum(what == "issues" for _, what, _ in log)
        assert issued and hidden(log) >= share * issued, (hidden(log), issued)
    if case == LATER:
        for log, _ in runs[0]:
            check_products_are_between_issue_and_wait(log)
    # A layer's backward pass sends its combined rows back while a forward pass runs its attention.
    log = runs[0][0][0]
    start = log.index(("B", "issues", 0))
    assert [event[:2] for event in log[start : start + 4]] == [
        ("B", "issues"),
        ("F", "issues"),
        ("B", "waits for"),
        ("B", "issues"),
    ]


def check_products_are_between_issue_and_wait(log: list[Event]) -> None:
    """Both products of a layer come right after the issue of the all-to-all that sends gradients of tokens back."""
    products = [place for place, (_, what, _) in enumerate(log) if what == "adds products"]
    assert products and len(products) % 2 == 0
    for first, second in zip(products[::2], products[1::2], strict=True):
        one, _, number = log[first]
        assert second == first + 1 and log[second] == log[first]
        assert log[first - 1] == (one, "issues", number)
        assert (one, "waits for", number) in log[second:]


def fails_in(case: Case, thread: str) -> None:
    """A step in which an all-to-all of one pass raises on rank 0."""
    issue, seen = dist.all_to_all_single, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        mine = (threading.current_thread().name == BACKWARD_THREAD) == (thread == "B")
        seen += mine and bool(kwargs.get("async_op"))
        if seen == 5 and dist.get_rank() == 0:
            raise ZeroDivisionError(f"in pass {thread}")
        return issue(*args, **kwargs)

    overlap.dist.all_to_all_single = failing
    try:
        run_trajectory(case.config, batches, 1)
    finally:
        overlap.dist.all_to_all_single = issue


@pytest.mark.parametrize("thread", ["B", pytest.param("F", marks=pytest.mark.exhaustive)])
def test_an_error_in_a_merged_step_ends_the_ranks(ranks: RankPool, thread: str) -> None:
    with pytest.raises(RankError, match=f"in pass {thread}") as raised:
        ranks.run(fails_in, 2, ALONE, thread)
    assert raised.value.rank == 0 and raised.value.kind not in ("died", "timeout")
