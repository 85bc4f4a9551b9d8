"""Wrappers of the methods of a layer and its modules (``LayerCalls``), such as recomputation.

Modules apply the wrappers in their constructors. ``automoe.parallel.choices`` chooses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import MethodType
from typing import Any

from torch import nn

Call = Callable[..., Any]
# The result takes what the argument takes, and returns what it returns.
Wrap = Callable[[Call], Call]


def as_it_is(call: Call) -> Call:
    """Return ``call``: the wrapper that changes nothing."""
    return call


def chain(*wraps: Wrap) -> Wrap:
    """Return the wrapper that applies all ``wraps``, the first of them innermost."""

    def wrapped(call: Call) -> Call:
        return reduce(lambda inner, wrap: wrap(inner), wraps, call)

    return wrapped


def bind(wrap: Wrap, method: Any) -> Call:
    """Return a module's bound ``method`` with ``wrap`` around it, to be called like the method.

    The function is wrapped before it is bound, so one compilation of it serves all modules.
    """
    return MethodType(wrap(method.__func__), method.__self__)


def call_module(module: nn.Module, *args: Any) -> Any:
    """Return ``module(*args)``: the call of a module as a plain function, which can be wrapped."""
    return module(*args)


@dataclass(frozen=True)
class LayerCalls:
    """Wrappers of one layer's calls, such as compilation and recomputation; default: none.

    ``automoe.parallel.choices`` makes them. A module of the layer applies them in its constructor
    and calls the results: ``wrapped_NAME`` is its method NAME with a wrapper around it (``bind``),
    and ``call_NAME(module, ...)`` calls a module through a wrapper (``call_module``).

    Attributes:
        layer: wraps the whole layer.
        run_attention: input norm, attention, the sum with its input, and the norm before the
            feed-forward.
        norm: each of the layer's two norms.
        gather: the all-gathers over tp before attention and feed-forward. If the outputs of norms
            are recomputed instead of kept, the gathered copies are too.
        project_up: latent attention's projections from latents to heads.
        core_attention: softmax attention, attention to compressed keys, or the delta rule, without
            projections.
        mlp, shared_experts: the feed-forward of a dense layer, and the one that all tokens pass
            next to their experts.
        router: each of the router's functions for scores, choice, routing weights and losses.
        run_experts: dispatch, experts and combine.
        side_stream: whether shared experts may run on a CUDA stream of their own.
    """

    layer: Wrap = as_it_is
    run_attention: Wrap = as_it_is
    norm: Wrap = as_it_is
    gather: Wrap = as_it_is
    project_up: Wrap = as_it_is
    core_attention: Wrap = as_it_is
    mlp: Wrap = as_it_is
    shared_experts: Wrap = as_it_is
    router: Wrap = as_it_is
    run_experts: Wrap = as_it_is
    side_stream: bool = True


UNWRAPPED = LayerCalls()
