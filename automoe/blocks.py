"""Chains of element-wise operations, a cache-full at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_ELEMENTS = 1 << 17  # 512 KiB of float32: what an operation wrote is still in L2 for the next


def row_blocks(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows over which to run a chain of element-wise operations, one slice after the other.

    On a CPU each operation of an eager chain reads and writes memory unless its operands fit the cache. A GPU
    pays for each launch instead, so it gets all rows at once.
    """
    step = max(1, BLOCK_ELEMENTS // max(width, 1)) if device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
