"""Actions that each rank runs alone, with one outcome for all ranks.

A disk can be full on one rank alone. The other ranks must learn of it: otherwise they would wait
for that rank in the next collective, or treat a failed save as complete.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from automoe.config.facts import SAVES
from automoe.errors import AutomoeError, CheckpointError, retried

T = TypeVar("T")


def for_all(rank: int, error: BaseException) -> OSError | CheckpointError | RuntimeError:
    """Return the error that every rank raises after ``error`` occurred on rank ``rank``.

    It can be pickled, and its text is the same on every rank. An ``OSError`` keeps its number, file
    and text; errors of automoe become ``CheckpointError``, all others ``RuntimeError``.
    """
    if isinstance(error, OSError):
        file = f" ({error.filename})" if error.filename else ""
        return OSError(error.errno or errno.EIO, f"{error.strerror or error}{file} on rank {rank}")
    if isinstance(error, AutomoeError):
        return CheckpointError(str(error))
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


def shared_error(errors: Iterable[Exception]) -> Exception:
    """Return the error that every rank raises: the first that is no ``OSError``, else the first.

    ``errors`` are those of the ranks that failed, in rank order.
    """
    return min(errors, key=lambda error: isinstance(error, OSError))


class Ranks:
    """All ranks of the run, for work on files: if one rank fails, all raise the same error.

    Every rank makes this object and calls its methods in the same order. A function given to a
    method may run twice, because a temporary disk error is retried.

    Args:
        timeout_s: longest wait for another rank, which may have a large file to write or to check.
            The wait is on a separate gloo group, so that a background save can communicate while
            training uses the other groups. None: use the default group.
        alone: True for this process alone, whatever other ranks do; a world of one rank is alone
            too.
    """

    def __init__(self, timeout_s: float | None = None, alone: bool = False) -> None:
        self.rank = 0
        self.size = 1
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized() and not alone:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            if timeout_s is not None:
                wait = timedelta(seconds=timeout_s)
                self.group = dist.new_group(backend="gloo", timeout=wait, group_desc=SAVES)

    def all(self, action: Callable[[], T]) -> list[T]:
        """Return the result of ``action`` on each rank, in rank order, on every rank.

        Raises:
            OSError, CheckpointError, RuntimeError: ``action`` raised on some rank; the error is the
                same on every rank. With a single rank the error of ``action`` is raised unchanged.
        """
        if self.size == 1:
            return [retried(action)]
        mine, cause = _attempt(self.rank, partial(retried, action))
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, mine, group=self.group)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            raise shared_error(errors) from cause
        return outcomes

    def lead(self, action: Callable[[], T], again: bool = True) -> T:
        """Run ``action`` on rank 0 alone and return its result on every rank.

        Args:
            again: retry after a temporary disk error. Pass False for an action that renames or
                flushes: Linux reports a failed flush once, and the next flush succeeds over pages
                that are lost.

        Raises:
            OSError, CheckpointError, RuntimeError: ``action`` raised; the same error on every rank.
                With a single rank the error of ``action`` is raised unchanged.
        """
        run = partial(retried, action) if again else action
        if self.size == 1:
            return run()
        outcome, cause = _attempt(0, run) if self.rank == 0 else (None, None)
        box: list[Any] = [outcome]
        dist.broadcast_object_list(box, src=0, group=self.group)
        if isinstance(box[0], Exception):
            raise box[0] from cause
        return box[0]

    def share(self, sizes: dict[str, int]) -> list[str]:
        """Return this rank's share of the names (of files, for example) to work on.

        Args:
            sizes: amount of work of each name, in any unit, such as bytes; the same on all ranks.
                Each name goes to one rank, and ranks get about the same sum.
        """
        load = [0] * self.size
        mine: list[str] = []
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            rank = load.index(min(load))
            load[rank] += sizes[name]
            if rank == self.rank:
                mine.append(name)
        return mine


def _attempt(rank: int, action: Callable[[], T]) -> tuple[T | Exception, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # Other ranks wait for an outcome.
        return for_all(rank, error), error
