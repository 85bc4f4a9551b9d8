"""Detection of slow ranks: one matrix product, equal on every rank, timed between the steps.

The step time cannot show a slow rank: ranks wait for one another in every layer, so all of them
take as long as the slowest.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from automoe.passes.trace import phase
from automoe.training.context import RunContext

# size and dtype of the product: it takes 0.2 ms on an H100, 0.5 ms on a CPU core
SIZES = {"cuda": (4096, torch.bfloat16), "cpu": (256, torch.float32)}
REPEATS = 4  # the fastest counts, since other processes interfere
SLOW = 1.2  # a rank is slow above this multiple of the median time
IN_A_ROW = 3  # slow timings in a row after which a rank is named


class SlowRanks:
    """Detector of slow ranks: all ranks time the same matrix product every ``every`` steps.

    Making it is collective, but no collective is added to a step: a rank learns the times of the
    others from the maximum over ranks of ``report``, which the caller computes with other numbers.

    Args:
        every: steps between timings; 0 disables them, as does a run of one rank.
        name: function that prints a line about a slow rank, called once per rank.
    """

    def __init__(self, context: RunContext, every: int, name: Callable[[str], object]) -> None:
        self._context = context
        self._name = name
        self._every = every if context.world_size > 1 else 0
        self._names = [f"probe_seconds.{rank}" for rank in range(context.world_size)]
        self._hosts = [socket.gethostname()] * context.world_size
        if self._every:
            dist.all_gather_object(self._hosts, socket.gethostname())
        self._marks: list[Any] = []
        self._behind: list[int] = []  # the ranks behind in the last timings
        self._named: set[int] = set()

    def begin_step(self, step: int) -> None:
        """Time a matrix product if a timing is due before ``step`` (counted from 1).

        On a GPU the product is only queued, and the host does not wait for it.
        """
        self._marks = []
        if not self._every or step % self._every:
            return
        size, dtype = SIZES[self._context.device.type]
        device = self._context.device
        drawn = torch.Generator(device).manual_seed(0)  # Zeros would draw less power.
        factor = torch.empty(size, size, dtype=dtype, device=device).uniform_(
            -1, 1, generator=drawn
        )
        torch.mm(factor, factor)  # The first call initialises the library.
        for _ in range(REPEATS):
            self._marks.append(self._now())
            with phase("probe", step):
                torch.mm(factor, factor)
        self._marks.append(self._now())

    def report(self) -> dict[str, float]:
        """Return ``probe_seconds.RANK`` -> seconds, for every rank of the run; 0 for all but this one.

        The seconds are those of one matrix product. A maximum over ranks gives all times. The
        result is empty in a step without a timing. Call this method after the host has waited for
        the device since ``begin_step``.
        """
        if not self._marks:
            return {}
        seconds = dict.fromkeys(self._names, 0.0)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        on_cuda = self._context.device.type == "cuda"
        fastest = min(a.elapsed_time(b) / 1000 if on_cuda else b - a for a, b in pairs)
        seconds[self._names[self._context.rank]] = fastest
        return seconds

    def record(self, over_ranks: Mapping[str, float]) -> dict[str, Any]:
        """Return the metrics of a timing by name; {} in a step without a timing.

        They are ``probe_seconds_min``, ``probe_seconds_median`` and ``probe_seconds_max`` over
        ranks, and ``slowest_rank`` and ``slowest_host``. If a rank is the slowest, above 1.2 times
        the median, three times in a row, print a line that names it.

        Args:
            over_ranks: maximum over all ranks of each value that ``report`` returned; other keys
                are ignored.
        """
        seconds = [over_ranks[name] for name in self._names if name in over_ranks]
        if not seconds:
            return {}
        middle = median(seconds)
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        self._behind = [*self._behind, slowest if seconds[slowest] > SLOW * middle else -1][
            -IN_A_ROW:
        ]
        if self._behind == [slowest] * IN_A_ROW and slowest not in self._named:
            self._named.add(slowest)
            times = seconds[slowest] / middle
            self._name(
                f"slow: rank {slowest} on {self._hosts[slowest]}, {times:.2f} times the median rank"
            )
        return {
            "probe_seconds_min": min(seconds),
            "probe_seconds_median": middle,
            "probe_seconds_max": seconds[slowest],
            "slowest_rank": slowest,
            "slowest_host": self._hosts[slowest],
        }

    def _now(self) -> Any:
        if self._context.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
