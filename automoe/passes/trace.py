"""Named phases of a run: ranges in a profiler's trace, and events for listeners.

    with phase("forward_backward", step):
        ...

A listener is called as ``listener(name, step, edge)`` with the edge ``begin`` before a phase and
``end`` after it; a phase that raises has no end. ``step`` is the number of the step that the phase
belongs to, counted from 1, and None outside of steps. This module does not import torch.

All counters, watchers and statistics ask ``trains`` whether the passes that run now belong to a
training step. A pass that only evaluates may have gradients, and a module in training mode may run
without, so neither of the two tells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Listener = Callable[[str, int | None, str], object]

_listeners: list[Listener] = []
_trains = False


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Mark the block as the phase ``name``, such as "grad_norm", for listeners and profiler.

    ``step`` is the number of the step that the phase belongs to, from 1; None: it is outside of
    steps. Without listeners and a running profiler the mark costs nothing.
    """
    for listener in tuple(_listeners):
        listener(name, step, "begin")
    with _profiler_range(name):
        yield
    for listener in tuple(_listeners):
        listener(name, step, "end")


@contextmanager
def training_pass() -> Iterator[None]:
    """Mark the block as forward and backward passes of a training step, in all threads."""
    global _trains
    before, _trains = _trains, True
    try:
        yield
    finally:
        _trains = before


def trains() -> bool:
    """Return True inside ``training_pass``, in any thread: only there a forward pass is counted."""
    return _trains


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` at every phase of this process, in any thread, during the block.

    It is called with the phase's name, its step (None outside of steps), and "begin" or "end".
    """
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
