"""Decisions of a forward pass that its recomputation repeats instead of making them anew.

Run again for its activations, a layer must send every token to the experts that it went to, even where a
score has moved by a rounding, and must not count the tokens a second time. Nothing is kept on a module:
under a pipeline several micro-batches of one layer wait for their backward pass at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TypeVar

T = TypeVar("T")


class Decisions:
    """What one forward pass of one region decided, in order."""

    def __init__(self) -> None:
        made: list = []
        self.first_pass, self.recomputation = _Pass(made, repeats=False), _Pass(made, repeats=True)


class _Pass:
    """Entered around one run of the region. A backward pass that is itself repeated enters it again."""

    def __init__(self, made: list, repeats: bool) -> None:
        self.made, self.repeats, self.position = made, repeats, 0

    def __enter__(self) -> None:
        self.position = 0
        self._token: Token = _CURRENT.set(self)

    def __exit__(self, *_exc: object) -> None:
        _CURRENT.reset(self._token)


# Of this thread alone: on a GPU autograd runs the backward pass, and so the recomputation, in one of its own.
_CURRENT: ContextVar[_Pass | None] = ContextVar("decisions", default=None)


def decided(make: Callable[..., T], *args: object) -> T:
    """``make(*args)``; in a recomputation what it returned in the first pass, without a call."""
    current = _CURRENT.get()
    if current is None:
        return make(*args)
    if current.repeats:
        current.position += 1
        return current.made[current.position - 1]
    current.made.append(make(*args))
    return current.made[-1]


def recomputing() -> bool:
    """True while a region runs again: what has effects beyond its result must then leave them out."""
    current = _CURRENT.get()
    return current is not None and current.repeats
