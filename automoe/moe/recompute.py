"""Results that a recomputation takes from the forward pass instead of computing them again
(activation checkpointing).

A recomputed layer must send every token to the experts that it went to, even if rounding changed a
score, and must not count the tokens a second time. No result is kept on a module: with a pipeline,
several micro-batches of one layer wait for their backward at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TypeVar

T = TypeVar("T")


class _Context:
    """Entered around one run of the function; the second context once more for each backward of a
    kept graph."""

    def __init__(self, saved: list, recomputes: bool) -> None:
        self.saved, self.recomputes, self.position = saved, recomputes, 0

    def __enter__(self) -> None:
        self.position = 0
        self._token: Token = _CURRENT.set(self)

    def __exit__(self, *_exc: object) -> None:
        _CURRENT.reset(self._token)


def recompute_contexts() -> tuple[_Context, _Context]:
    """For one call of a checkpointed function, made anew: the contexts of its forward pass and of
    its recomputation."""
    saved: list = []
    return _Context(saved, False), _Context(saved, True)


# Per thread: on a GPU autograd runs the backward, and so the recomputation, in a thread of its own.
_CURRENT: ContextVar[_Context | None] = ContextVar("recompute", default=None)


def save_for_recompute(fn: Callable[..., T], *args: object) -> T:
    """``fn(*args)``; in a recomputation the result of the forward pass, without a call."""
    current = _CURRENT.get()
    if current is None:
        return fn(*args)
    if current.recomputes:
        current.position += 1
        return current.saved[current.position - 1]
    current.saved.append(fn(*args))
    return current.saved[-1]


def is_recomputing() -> bool:
    """True in a recomputation, which must have no effect beyond its result."""
    current = _CURRENT.get()
    return current is not None and current.recomputes
