"""What tests of a stranger's files share: an end for what would hang, and the check of a refusal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from automoe.errors import AutomoeError

DEEP = "[" * 300 + "]" * 300
DEEPER = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000


@contextmanager
def ends_within(seconds: int) -> Iterator[None]:
    """What waits for a FIFO's other end, or counts to 10**9, ends with ``TimeoutError``."""

    def end(signum: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(work: Callable[[], Any], *needles: str) -> str:
    with pytest.raises(AutomoeError) as caught:
        work()
    for needle in needles:
        assert needle in str(caught.value)
    return str(caught.value)
