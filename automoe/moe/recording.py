"""What routers chose, seen from outside: for files of routing, and to force one run's choices on another.

Shapes: B rows, S positions, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from automoe.moe.recompute import is_recomputing
from automoe.moe.router import Router, Routing
from automoe.moe.tokens import Tokens


@contextmanager
def watch_routing(modules: Iterable[nn.Module], keep: Callable[[Router, Tokens, Routing], object]) -> Iterator[None]:
    """Call ``keep(router, tokens, routing)`` after every forward of a router in ``modules``, recomputation apart."""

    def hook(router: nn.Module, inputs: tuple, routing: Routing) -> None:
        if not is_recomputing():
            assert isinstance(router, Router)
            keep(router, inputs[1], routing)

    routers = [module for part in modules for module in part.modules() if isinstance(module, Router)]
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    """Keep the choices of every router of ``model``, which holds all layers and whole rows (no pp, no cp).

    Rounding can flip a top-k choice between two runs that are otherwise equal; with the choices of the first
    forced on the second, what is left to compare is arithmetic.

    Gives a function that returns them so far: [B, S, L, 2, K] int64, rows in the order they were seen; 2: chosen,
    plain top-k.
    """
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(router: Router, _tokens: Tokens, routing: Routing) -> None:
        choices = torch.stack((routing.ids, routing.plain_ids), dim=2).cpu()
        seen.setdefault(router.moe_index, []).append(choices)

    with watch_routing([model], keep):
        yield lambda: torch.stack([torch.cat(choices) for _, choices in sorted(seen.items())], dim=2)
