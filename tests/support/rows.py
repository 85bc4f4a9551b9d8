"""Ranks that share rows, without ranks."""

from __future__ import annotations

import torch

from automoe.comm.communicators import Communicator
from automoe.model.rows import head_tail_index


class PartOfRows(Communicator):
    """One of ``num_ranks`` ranks that share rows; ``whole`` is what all of them hold, in order."""

    def __init__(self, rank: int, num_ranks: int, whole: torch.Tensor) -> None:
        self.rank, self.num_ranks, self.whole = rank, num_ranks, whole

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        length = self.whole.shape[1]
        parts = [self.whole[:, head_tail_index(length, self.num_ranks, rank)] for rank in range(self.num_ranks)]
        assert torch.equal(x, parts[self.rank])
        return torch.cat(parts, dim=1)
