"""Sum of squares for the gradient norm on a GPU: sums in float64 and reads each number once.

torch's norm with another dtype first makes a float64 copy of the tensor. On an H200 that took 70 ms
of a step of 830 ms, for 46 GB of gradients, which can be read in 10 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers that a program adds at once
BLOCKS = 64  # blocks per program


@triton.jit
def _squares(numbers, sums, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    total = tl.zeros([BLOCK], tl.float64)
    for block in range(BLOCKS):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(numbers + at, mask=at < count, other=0.0).to(tl.float64)
        total += number * number
    tl.store(sums + tl.program_id(0), tl.sum(total))


def sum_of_squares(numbers: Tensor) -> Tensor:
    """Return the sum of the squares of all ``numbers`` as a float64 scalar, in a fixed order."""
    flat = numbers.reshape(-1)
    programs = triton.cdiv(flat.numel(), BLOCK * BLOCKS)
    sums = torch.empty(programs, dtype=torch.float64, device=flat.device)
    if programs:
        _squares[(programs,)](flat, sums, flat.numel(), BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4)
    return sums.sum()
