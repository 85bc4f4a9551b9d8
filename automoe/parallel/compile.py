"""``train.compile``: torch.compile of the parts of a layer that have the same shapes in every step.

Attention with both norms, FFNs, the router's arithmetic, the last norm and a chunk of the loss are
compiled whole (a graph break is an error), each once for all layers that are alike, as torchtitan
compiles its transformer blocks. Dispatch and experts are not compiled: the number of tokens per
expert changes with every step, on some ranks the sizes come from the host, and the products have
kernels of their own. Compiled code never sees these sizes, so they cause no recompilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from automoe.comm.collectives import wait_tensor
from automoe.model.block import MLP, Block
from automoe.model.decoder import Decoder
from automoe.model.mtp import MTPBlock
from automoe.model.norm import RMSNorm
from automoe.moe.router import Router

# The router saves its choice of experts for the recomputation between ``score`` and ``weigh``, in
# Python, so its forward is compiled in parts.
COMPILED: dict[type[nn.Module], tuple[str, ...]] = {
    Block: ("mix",),
    MTPBlock: ("mix",),
    MLP: ("forward",),
    Router: ("score", "select", "weigh", "count"),
}

# Versions of one function in a process: each kind of layer, recomputed or not, with and without
# gradients, for each dtype and shape. torch's default of 8 is enough for one dtype only.
VERSIONS = 256


def apply_compile(model: Decoder, backend: str = "inductor") -> None:
    """Compile the ``COMPILED`` methods of the model's modules and its last norm, at first call.

    Call this function before recomputation, which runs compiled parts again unchanged, and before
    FSDP, whose hooks stay outside. The loss was compiled with the model's backend.
    """
    for module in model.modules():
        for name in COMPILED.get(type(module), ()):
            _compile_method(module, name, backend)
    if model.norm is not None:
        assert type(model.norm) is RMSNorm
        _compile_method(model.norm, "forward", backend)
    assert model.backend.always_masked, "a mask is made for some documents and not for others"


def _compile_method(module: nn.Module, name: str, backend: str) -> None:
    setattr(module, name, partial(compiled(getattr(type(module), name), backend), module))


@functools.cache  # one for all modules: torch keeps what it has compiled by function
def compiled(fn: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Return ``fn`` compiled whole at its first call, once per dtype and shape of its arguments."""
    import torch.compiler.config as limits

    # Shapes are constants: they do not change, and a kernel that knows them is better.
    code = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)

    def call(*args: Any) -> Any:
        # Set at every call: the limit is per thread, and autograd recomputes in threads of its
        # own.
        if limits.recompile_limit < VERSIONS:
            limits.recompile_limit = VERSIONS
        # Given one of torch's asynchronous tensors, compiled code returns no gradient for it (seen
        # in torch 2.13).
        return code(*map(wait_tensor, args))

    return call
