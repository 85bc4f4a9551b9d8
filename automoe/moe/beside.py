"""Work on a CUDA stream of its own, beside what the current stream does next, in both passes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one side stream of ``device``."""
    return torch.cuda.Stream(device)


class _Fork(torch.autograd.Function):
    """Identity. In the backward pass the current stream waits here for all that the side stream was given.

    Autograd orders the gradient of x by itself, but not the gradients of weights that are accumulated on the
    side stream: FSDP reads those on the current one as soon as the gradient of x is there.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
        ctx.side = side
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        torch.cuda.current_stream(grad.device).wait_stream(ctx.side)
        return grad, None


def run_beside(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start ``fn(x)`` on the side stream of x's CUDA device.

    Returns:
        A function that makes the current stream wait for the result and returns it; call it once.
    """
    main, side = torch.cuda.current_stream(x.device), side_stream(x.device)
    x = _Fork.apply(x, side)
    side.wait_stream(main)
    # Autograd keeps x for the backward pass on the side stream too: its memory is free when both are done.
    x.record_stream(side)
    with torch.cuda.stream(side):
        out = fn(x)

    def join() -> torch.Tensor:
        main.wait_stream(side)
        out.record_stream(main)
        return out

    return join
