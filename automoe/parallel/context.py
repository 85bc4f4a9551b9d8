"""Context parallelism: each rank of the cp axis holds a part of every row.

Shapes: B rows, R positions of the whole row, S = R / cp positions of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from automoe.config.schema import ParallelConfig
from automoe.model.decoder import Decoder
from automoe.parallel.collectives import all_gather
from automoe.parallel.mesh import Meshes


def head_tail_index(seq_len: int, cp: int, rank: int) -> torch.Tensor:
    """[R / cp] row positions that cp rank ``rank`` holds.

    The row is cut into 2 cp chunks and a rank holds one from the head and its mirror from the tail:
    under causal attention every rank then has the same number of (query, key) pairs.
    """
    chunk = seq_len // (2 * cp)
    head = torch.arange(rank * chunk, (rank + 1) * chunk)
    tail = torch.arange((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk)
    return torch.cat((head, tail))


class GatherRows:
    """Row exchange over the cp group: keys and values (for MLA, latents) of all ranks, side by side.

    Attention masks by each key's own row index and document, so the order of the parts does not matter.
    """

    whole = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_parts = dist.get_world_size(group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 1, self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total


def apply_context_parallel(model: Decoder, meshes: Meshes, parallel: ParallelConfig) -> None:
    """Hand the model an exchange over the cp axis, and for ``ring`` the attention that goes with it."""
    mesh = meshes.axis("cp")
    if mesh is None:
        return
    if parallel.context == "gather":
        model.exchange = GatherRows(mesh.get_group())
        return
    from automoe.parallel.ring import RingAttention, RingRows

    model.exchange = RingRows(mesh.get_group())
    model.attend = RingAttention(mesh)
