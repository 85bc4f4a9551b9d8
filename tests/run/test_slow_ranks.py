"""A rank that is slow is named, and one that is slow for a moment is not."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from automoe.passes.trace import listening
from automoe.run import slow_ranks
from automoe.run.slow_ranks import SlowRanks
from automoe.training.context import RunContext
from automoe.training.stats import max_over_ranks
from automoe.verify.pool import RankPool


def timings(slow_in: tuple[int, ...], every: int, steps: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What each step records, and the lines said, where rank 2's products take long in the steps ``slow_in``."""
    lines: list[str] = []
    context = RunContext(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"), Path())

    def sleep(name: str, step: int | None, edge: str) -> None:
        if (name, edge, context.rank) == ("probe", "begin", 2) and step in slow_in:
            time.sleep(0.25)

    with listening(sleep), mock.patch.object(socket, "gethostname", lambda: f"node-{dist.get_rank() // 2}"):
        watched, records = SlowRanks(context, every, lines.append), []
        for step in range(1, steps + 1):
            watched.begin_step(step)
            own = watched.report()
            assert len(own) == (context.world_size if step % every == 0 else 0)
            records.append(watched.record(max_over_ranks(own) if own else {}))
    return records, lines


def test_a_rank_that_stays_behind_is_named_once_with_its_host(ranks: RankPool) -> None:
    heard = ranks.run(timings, 4, (2, 4, 6, 8), 2, 8)
    for records, lines in heard:
        assert [bool(record) for record in records] == [False, True] * 4
        for record in records[1::2]:
            assert (record["slowest_rank"], record["slowest_host"]) == (2, "node-1")
            assert record["probe_seconds_min"] <= record["probe_seconds_median"] < 0.25 <= record["probe_seconds_max"]
        assert len(lines) == 1 and lines[0].startswith("slow: rank 2 on node-1, ") and len(lines[0]) < 68
    assert heard[0] == heard[3], "all ranks hear the same"


def named(seconds: list[float]) -> dict[str, float]:
    return {f"probe_seconds.{rank}": value for rank, value in enumerate(seconds)}


def test_a_moment_names_nobody() -> None:
    context = RunContext(0, 3, 0, torch.device("cpu"), Path())
    lines: list[str] = []
    with mock.patch.object(dist, "all_gather_object"):
        watched = SlowRanks(context, 1, lines.append)
    slow, even = [1.0, 1.0, 1.5], [1.0, 1.1, 1.0]
    for seconds in (slow, slow, even, slow, slow, [1.0, 1.5, 1.0], slow):
        assert watched.record(named(seconds))["probe_seconds_max"] == max(seconds)
    assert not lines
    for seconds in (slow, slow, slow):
        watched.record(named(seconds))
    assert len(lines) == 1 and slow_ranks.IN_A_ROW == 3


def test_one_rank_alone_times_nothing() -> None:
    watched = SlowRanks(RunContext(0, 1, 0, torch.device("cpu"), Path()), 1, print)
    watched.begin_step(1)
    assert watched.report() == {} and watched.record({}) == {}
