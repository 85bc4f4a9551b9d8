"""How each product of the experts is cut into blocks and pipelined on Hopper.

A program sums over ``summed`` elements a step, ``num_stages`` steps in flight. A warpgroup (four warps) multiplies 64 rows
by up to 256 columns and reads its rows and all columns from shared memory, of which a multiprocessor has 227 KB that give
128 bytes a cycle: what decides is how many bytes a cycle's 2,048 multiplications read and the loads write there. Blocks of
128 x 256 need 128 bytes, 128 x 128 need 160, 128 x 64 need 224. No block was timed on a GPU yet:
``benchmarks/tune_kernels.py`` times ``candidates``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class Blocks:
    """One program's share and how it runs. The rows of all products but gradients of weights are a tile's."""

    columns: int
    num_stages: int = 4
    summed: int = 64
    num_warps: int = 8
    rows: int = 128  # of a gradient of weights
    columns_at_once: int = 0  # of an epilogue that would spill with all
    tma: bool = False  # copy with the tensor memory accelerator


INTERPRETED = triton.knobs.runtime.interpret

HOPPER = {
    # Gate and up: 256 columns of products.
    "up": Blocks(128, tma=True),
    "down": Blocks(256, tma=True),
    "back": Blocks(256, columns_at_once=32, tma=True),
    "grad_rows": Blocks(256, tma=True),
    "grad_weights": Blocks(256),
    # Rows are loaded by way of their index. Triton spreads the stages over both loads: 7 leave the rows what 4
    # leave others; 4 leave them two, so that each step waits for memory.
    "grad_weights_gathered": Blocks(256, num_stages=7),
}
# Float32 is multiplied in full by the ordinary cores: operands take twice the shared memory, of which HOPPER's blocks would
# want more than there is, and products more registers. So do rows that begin anywhere: threads copy them number by number.
SMALL = Blocks(64, num_stages=2, summed=32, rows=64, columns_at_once=16)
_INTERPRETED = Blocks(16, num_stages=1, summed=16, num_warps=4, rows=16, columns_at_once=8, tma=True)


def blocks_of(product: str, dtype: torch.dtype, aligned: bool) -> Blocks:
    """Blocks of one of ``HOPPER``'s products; in the interpreter, where size is time, the smallest there are.

    ``aligned``: all rows begin at multiples of 16 bytes.
    """
    if INTERPRETED:
        return _INTERPRETED
    return HOPPER[product] if aligned and dtype != torch.float32 else SMALL


def candidates(product: str) -> list[Blocks]:
    """What may be faster than ``HOPPER``'s choice, that choice first."""
    chosen = HOPPER[product]
    narrow = replace(chosen, columns=chosen.columns // 2)
    found = [chosen, narrow] + [replace(chosen, tma=False)] * chosen.tma
    if product == "back":
        found += [replace(narrow, columns_at_once=64)]
    if product == "grad_weights_gathered":
        found += [replace(chosen, num_stages=5), replace(narrow, num_stages=10)]
    else:
        # Three stages of half the columns leave room for a second program, which computes while the first one stores
        # (not in "back", whose registers leave none).
        found += [replace(chosen, num_stages=3), replace(narrow, num_stages=3), replace(narrow, num_warps=4)]
    return found + [replace(chosen, summed=128, num_stages=2)]
