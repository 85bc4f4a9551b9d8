"""Wrappers of a layer's calls, which the layer's modules are built with and keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Call = Callable[..., Any]
# The result takes what the argument takes, and returns what it returns.
Wrap = Callable[[Call], Call]


def as_it_is(call: Call) -> Call:
    """Return ``call``: the wrapper that changes nothing."""
    return call


def call_module(module: nn.Module, *args: Any) -> Any:
    """Return ``module(*args)``: the call of a module as a plain function, which can be wrapped."""
    return module(*args)


@dataclass(frozen=True)
class LayerCalls:
    """Wrappers of one layer's calls, such as compilation and recomputation; default: none.

    ``automoe.parallel.build`` makes them, and the modules of the layer apply them. A wrapped
    function is an unbound method, which gets its module as the first argument: one compilation of it
    then serves all layers.

    Attributes:
        layer: the whole layer.
        mix: input norm, attention, the sum with its input, and the norm before the feed-forward.
        norm: each of these two norms.
        gather: all-gathers over tp before attention and feed-forward, which are discarded with
            norms.
        project_up: latent attention's projections from latents to heads.
        attend: softmax attention or the delta rule, without projections.
        mlp, shared_experts: a feed-forward that all tokens pass.
        router: each part of the router's arithmetic.
        run_experts: dispatch, experts and combine.
        side_stream: whether shared experts may run on a CUDA stream of their own.
    """

    layer: Wrap = as_it_is
    mix: Wrap = as_it_is
    norm: Wrap = as_it_is
    gather: Wrap = as_it_is
    project_up: Wrap = as_it_is
    attend: Wrap = as_it_is
    mlp: Wrap = as_it_is
    shared_experts: Wrap = as_it_is
    router: Wrap = as_it_is
    run_experts: Wrap = as_it_is
    side_stream: bool = True


UNWRAPPED = LayerCalls()
