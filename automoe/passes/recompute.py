"""Results that activation checkpointing keeps from the forward pass instead of recomputing.

A recomputed layer must send every token to the same experts as the forward pass, even if rounding
changed a score, and must not count the tokens a second time. No result is kept on a module: with a
pipeline, several micro-batches of one layer wait for their backward at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TypeVar

from automoe.passes.trace import trains

T = TypeVar("T")


class _Context:
    """Context manager around one run of a checkpointed function, its forward or its recomputation.

    Within it ``save_for_recompute`` appends the result of each of its calls to ``saved`` (forward,
    ``recomputes`` False) or returns the stored results in the same order (recomputation). Both
    contexts of a call share ``saved``. Torch enters the recomputation's context again for each
    backward of a retained graph, and begins at the first result again.
    """

    def __init__(self, saved: list, recomputes: bool) -> None:
        self.saved = saved
        self.recomputes = recomputes
        self.position = 0

    def __enter__(self) -> None:
        self.position = 0
        self._token: Token = _CURRENT.set(self)

    def __exit__(self, *_exc: object) -> None:
        _CURRENT.reset(self._token)


def recompute_contexts() -> tuple[_Context, _Context]:
    """Return two context managers for one call of a checkpointed function.

    In the first (forward) ``save_for_recompute`` stores its results; in the second (recomputation)
    it returns them in the same order, and ``is_recomputing()`` is True. Pass this function as
    ``context_fn`` of ``torch.utils.checkpoint``.
    """
    saved: list = []
    return _Context(saved, False), _Context(saved, True)


# The state is per thread: on a GPU autograd runs the backward, and so the recomputation, in a
# thread of its own.
_CURRENT: ContextVar[_Context | None] = ContextVar("recompute", default=None)


def save_for_recompute(fn: Callable[..., T], *args: object) -> T:
    """Return ``fn(*args)``, and save it; in a recomputation return the saved result instead.

    The n-th call in the recomputation of a checkpointed function gets the result of the n-th call
    in its forward pass. Outside of functions that are checkpointed with ``recompute_contexts``
    nothing is saved.
    """
    current = _CURRENT.get()
    if current is None:
        return fn(*args)
    if current.recomputes:
        current.position += 1
        return current.saved[current.position - 1]
    current.saved.append(fn(*args))
    return current.saved[-1]


def is_recomputing() -> bool:
    """Return True while a checkpointed function is recomputed, which must have no side effects."""
    current = _CURRENT.get()
    return current is not None and current.recomputes


def is_counted() -> bool:
    """Return True if the current forward pass counts in statistics.

    It does inside ``training_pass`` (``automoe.passes.trace.trains``), unless it is a recomputation.
    """
    return trains() and not is_recomputing()
