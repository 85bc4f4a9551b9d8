"""Phases of a run by name: ranges in a profiler's trace, and what listeners are told of.

    with phase("forward_backward", step):
        ...

A listener is called as ``listener(name, step, edge)`` with the edge ``begin`` before a phase and
``end`` after it; a phase that raises has no end. ``step`` is the number of the step that the phase
belongs to, counted from 1, and None outside of steps. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Listener = Callable[[str, int | None, str], object]

_listeners: list[Listener] = []


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Mark what runs inside as the phase ``name``; free of cost where nobody listens and no
    profiler runs."""
    for listener in tuple(_listeners):
        listener(name, step, "begin")
    with _profiler_range(name):
        yield
    for listener in tuple(_listeners):
        listener(name, step, "end")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of every phase of this process meanwhile, those of its threads included."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _profiler_range(name: str) -> AbstractContextManager[object]:
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    from automoe.interop.torch_private import profiler_runs

    if not profiler_runs():
        return nullcontext()
    return torch.profiler.record_function(name)
