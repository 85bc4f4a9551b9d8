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
from typing import Any

import torch

from automoe.comm.collectives import wait_tensor

# Versions of one function in a process: each kind of layer, recomputed or not, with and without
# gradients, for each dtype and shape. torch's default of 8 is enough for one dtype only.
VERSIONS = 256


@functools.cache  # one for all modules: torch keeps what it has compiled by function
def compiled(fn: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Return ``fn`` compiled without graph breaks, once per dtype and shape of its arguments.

    The compiler runs at the first call. ``backend`` is torch.compile's.
    """
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
