"""Which rows a kernel's tile works on, found on the device: no host ever waits for the routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowTiles:
    """R rows sorted by expert, cut into tiles of ``height`` rows that never cross an expert's border.

    There are more slots than tiles, since the host knows R and not the counts: R / height full tiles at
    most, and one partial tile for each expert.

    Attributes:
        expert: [slots] int32, the expert of a tile; E in a slot without a tile.
        first_row: [slots] int32.
        offsets: [E] int32, end of each expert's rows.
    """

    expert: torch.Tensor
    first_row: torch.Tensor
    offsets: torch.Tensor
    height: int

    @property
    def slots(self) -> int:
        return self.expert.numel()


def row_tiles(offsets: torch.Tensor, num_rows: int, height: int) -> RowTiles:
    """Tiles of ``height`` rows for experts that end at ``offsets`` [E] among ``num_rows`` rows."""
    num_experts = offsets.numel()
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
    """Rows of a tile: what an expert has on average, from 16, the least a matrix instruction takes, to 128."""
    average = max(1, num_rows // max(num_experts, 1))
    return min(128, max(16, 1 << (average - 1).bit_length()))
