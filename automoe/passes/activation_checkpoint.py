"""Recomputation (activation checkpointing, arXiv 1604.06174) of whole layers or of parts of them.

A region keeps its inputs and runs again when its backward pass begins. Regions lie inside the FSDP
units of their layers, whose weights are then unsharded. Experts are an FSDP unit inside a region,
so their hooks run both times. Collectives inside a region run again too, in the same order on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from automoe.passes.recompute import recompute_contexts


@dataclass(eq=False)  # hashable: a function may be a key of a cache
class Recomputed:
    """Activation checkpointing of ``fn``: the backward pass computes intermediate results again.

    The wrapper has the arguments and the result of ``fn``.

    Args:
        to_end: recompute to the end, not only to the last tensor that is needed. An FSDP unit
            inside ``fn`` needs this: if stopped early, its state would stay that of a forward pass.
        saves: ``fn`` calls ``save_for_recompute``, whose results its recomputation reads.
    """

    fn: Callable[..., Tensor]
    to_end: bool = False
    saves: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        call = partial(self.fn, **kwargs) if kwargs else self.fn
        # No compiled part has an FSDP unit or saves results.
        if torch.compiler.is_compiling():
            return checkpoint(call, *args, use_reentrant=False)
        return checkpoint(
            call,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing in a layer draws from a generator's state
            early_stop=not self.to_end,
            context_fn=recompute_contexts if self.saves else noop_context_fn,
        )
