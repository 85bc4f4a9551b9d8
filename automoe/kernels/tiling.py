"""Block sizes of the experts' kernels on Hopper, and the tiles of rows that kernels process.

A Triton program sums over ``summed`` elements per step, with ``num_stages`` steps in flight. A
warpgroup (four warps) multiplies 64 rows by up to 256 columns. It reads its rows and all columns
from shared memory, of which a multiprocessor has 227 KB at 128 bytes per cycle. The limit is
therefore the traffic of shared memory: the bytes that loads write, and those that a cycle's 2,048
multiplications read. Blocks of 128 x 256 need 128 bytes per cycle, 128 x 128 need 160, 128 x 64
need 224. ``benchmarks/tune_kernels.py`` timed these and other block sizes on an H200; ``HOPPER``
has the fastest for each product, over five layers of published MoE models.

The tiles of rows are computed on the device, so the host never waits for the routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from automoe.kernels.served import INTERPRETED


@dataclass(frozen=True)
class Blocks:
    """Block sizes and launch parameters of one program of a Triton kernel.

    Attributes:
        columns: columns of the output block.
        num_stages, num_warps: Triton's launch options.
        summed: elements of the summed dim that are loaded per step.
        rows: rows of the output block in weight gradients; other products have the tile's height (``RowTiles``).
        columns_at_once: columns that the kernel of the activation's backward pass processes at a time, to save
            registers; 0 for other kernels.
        tma: whether operands are copied by the tensor memory accelerator.
    """

    columns: int
    num_stages: int = 4
    summed: int = 64
    num_warps: int = 8
    rows: int = 128  # rows of a block of a weight gradient
    columns_at_once: int = 0  # columns per pass of an epilogue that would spill with all of them
    tma: bool = False  # copy with the tensor memory accelerator


def precision(dtype: torch.dtype) -> str:
    """Return ``input_precision`` of ``tl.dot`` for ``dtype``: ``ieee`` for float32, else ``tf32``.

    For 16-bit and 8-bit dtypes it has no effect on a GPU. Triton's interpreter always gets
    ``ieee``.
    """
    return "ieee" if dtype == torch.float32 or INTERPRETED else "tf32"


HOPPER = {
    # Gate and up together make 256 columns.
    "up": Blocks(128, tma=True),
    "down": Blocks(256, tma=True),
    "back": Blocks(256, columns_at_once=32),
    "grad_rows": Blocks(256, tma=True),
    "grad_weights": Blocks(256),
    # Rows are loaded through their index, and Triton spreads the stages over both loads.
    "grad_weights_gathered": Blocks(256, num_stages=5),
}
# Float32 is multiplied in full by the ordinary cores. Its operands take twice the shared memory,
# more than there is for HOPPER's blocks, and its products more registers. Unaligned rows also need
# small blocks: threads copy them one number at a time.
SMALL = Blocks(64, num_stages=2, summed=32, rows=64, columns_at_once=16)
_INTERPRETED = Blocks(
    16, num_stages=1, summed=16, num_warps=4, rows=16, columns_at_once=8, tma=True
)


def blocks_of(product: str, dtype: torch.dtype, aligned: bool) -> Blocks:
    """Return the block sizes with which a product of the experts' kernels is launched.

    They are those of ``HOPPER`` for aligned rows of a dtype other than float32, else ``SMALL``.
    Triton's interpreter gets the smallest blocks, since its time grows with their size.

    Args:
        product: a key of ``HOPPER``, such as ``up`` or ``down``.
        dtype: dtype of the operands.
        aligned: True if all rows begin at multiples of 16 bytes.
    """
    if INTERPRETED:
        return _INTERPRETED
    return HOPPER[product] if aligned and dtype != torch.float32 else SMALL


@dataclass(frozen=True)
class RowTiles:
    """R rows sorted by expert, cut into tiles of ``height`` rows of one expert each.

    The host knows R but not how many rows each expert has, so it launches programs for the largest
    possible number of tiles ("slots"): ceil(R / height), and one more per expert.

    Attributes:
        expert: [slots] int32, the expert of a tile; E (number of experts) in a slot without a tile.
        first_row: [slots] int32, the first row of a tile.
        offsets: [E] int32, end of each expert's rows.
        height: rows of a tile.
    """

    expert: Tensor
    first_row: Tensor
    offsets: Tensor
    height: int

    @property
    def slots(self) -> int:
        return self.expert.numel()


def row_tiles(offsets: Tensor, num_rows: int, height: int | None = None) -> RowTiles:
    """Cut ``num_rows`` rows sorted by expert into tiles of ``height`` rows of one expert each.

    Args:
        offsets: [E] int32, end of each expert's rows.
        height: None: the result of ``tile_height``, or 16 in Triton's interpreter.
    """
    num_experts = offsets.numel()
    if height is None:
        height = 16 if INTERPRETED else tile_height(num_rows, num_experts)
    ends = offsets.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tiles = (ends - starts + height - 1) // height
    last = tiles.cumsum(0)  # end of each expert's tiles
    slot = torch.arange(-(-num_rows // height) + num_experts, device=offsets.device)
    expert = torch.searchsorted(last, slot, right=True)
    known = expert.clamp(max=num_experts - 1)
    row = starts[known] + (slot - (last - tiles)[known]) * height
    return RowTiles(expert.int(), row.int(), offsets.int(), height)


def tile_height(num_rows: int, num_experts: int) -> int:
    """Return the rows per tile: an expert's mean number of rows, rounded up to 16, 32, 64 or 128.

    A matrix instruction needs at least 16 rows; larger means give 128.
    """
    average = max(1, num_rows // max(num_experts, 1))
    return min(128, max(16, 1 << (average - 1).bit_length()))
