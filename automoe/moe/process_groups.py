"""The groups of ranks that a model's modules talk to, as objects that they are given when they are
built.

Shapes: B rows, S positions of one rank, P ranks of the group. A model on one rank is given
``SINGLE_RANK`` alone, which sends nothing, so the modules read alike on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class Communicator:
    """One group of ranks, of which this one is number ``rank``: this rank alone, where a subclass
    does not say more.

    Positions are dim 1 of what is sent.
    """

    rank = 0
    num_ranks = 1

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] -> [B, P S, ...] of all ranks in order; the gradient is reduce-scattered."""
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[B, P S, ...], this rank's term of a sum over ranks -> its shard [B, S, ...] of the
        sum."""
        return x

    def local_shard(self, x: torch.Tensor) -> torch.Tensor:
        """[B, P S, ...] that all ranks have -> this rank's [B, S, ...]; nothing is sent."""
        return x

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; not differentiable."""
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; differentiable: the gradient is the sum of what reaches the result on
        each of them."""
        return x

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks; not differentiable."""
        return x


SINGLE_RANK = Communicator()


def first_of_rank(comm: Communicator, total: int) -> int:
    """Number of the first of ``total`` heads, key heads or vocabulary rows that this rank has a
    part of."""
    return comm.rank * total // comm.num_ranks


@dataclass(frozen=True)
class ProcessGroupCollection:
    """Every group that a model's modules talk to; the default is a model on one rank.

    Attributes:
        sequence: tensor and sequence parallelism. Its ranks hold slices of one weight; between two
            blocks each has its shard of the positions, which are gathered where the weights
            multiply them.
        context: the ranks that hold parts of the same rows.
        keys: the ranks from which attention gathers keys and values: ``context``, or this one alone
            where the attention kernel itself sends them round (ring attention).
        data: the ranks with other rows of the same micro-batch, one communicator an axis.
    """

    sequence: Communicator = SINGLE_RANK
    context: Communicator = SINGLE_RANK
    keys: Communicator = SINGLE_RANK
    data: tuple[Communicator, ...] = ()

    @property
    def ranks_per_row(self) -> int:
        """How many ranks share the tokens of a row between two blocks."""
        return self.context.num_ranks * self.sequence.num_ranks

    def sum_over_row(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share the tokens of a row between two blocks; not
        differentiable."""
        return self.context.all_reduce(self.sequence.all_reduce(x))

    def sum_over_data(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that have other rows of the micro-batch; not differentiable."""
        for communicator in self.data:
            x = communicator.all_reduce(x)
        return x
