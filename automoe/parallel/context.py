"""Context parallelism: each rank of the cp axis holds a part of every row.

Shapes: B rows, R positions of the whole row, S = R / cp positions of this rank.
"""

from __future__ import annotations

import torch

from automoe.config.schema import ParallelConfig
from automoe.model.decoder import Decoder
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


def apply_context_parallel(model: Decoder, meshes: Meshes, parallel: ParallelConfig) -> None:
    """For ``ring`` hand the model the attention that goes with it."""
    mesh = meshes.axis("cp")
    if mesh is None or parallel.context == "gather":
        return
    from automoe.parallel.ring import RingAttention

    model.attend = RingAttention(mesh)
