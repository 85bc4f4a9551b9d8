"""Process groups as objects that a model's modules receive when they are built.

A model on one rank receives only ``SINGLE_RANK``, which sends nothing, so the modules read alike on
every mesh. Shapes: B sequences, S positions of one rank, P ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class Communicator:
    """One group of ``num_ranks`` ranks, in which this rank is number ``rank``.

    The base class is a group of this rank alone, so its methods do nothing; subclasses communicate.
    Shards are along dim 1, the positions of tokens.
    """

    rank = 0
    num_ranks = 1

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the positions [B, S, ...] of P ranks, in rank order: [B, P S, ...].

        Gradients are reduce-scattered.
        """
        return x

    def all_to_all(self, x_P: Tensor) -> Tensor:
        """Send slice p of x [P, ...] to rank p; slice r of the result [P, ...] is from rank r.

        Gradients go back the same way.
        """
        return x_P

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum the ranks' terms [B, P S, ...] and return this rank's shard [B, S, ...]."""
        return x

    def local_shard(self, x: Tensor) -> Tensor:
        """Split x [B, P S, ...], equal on all ranks, into P slices; return this rank's [B, S, ...].

        Rank r gets positions r S to (r + 1) S - 1.
        """
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks; not differentiable."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, differentiably.

        The gradient of x is the sum over ranks of the gradients of their results.
        """
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the element-wise maximum of x over the ranks; not differentiable."""
        return x


SINGLE_RANK = Communicator()


def first_of_rank(comm: Communicator, total: int) -> int:
    """Return the index of the first item that this rank holds, wholly or in part.

    ``total`` items (heads, key heads or vocabulary rows) are spread evenly over the ranks of
    ``comm``.
    """
    return comm.rank * total // comm.num_ranks


@dataclass(frozen=True)
class ProcessGroupCollection:
    """Every group that a model's modules communicate over; the default is a model on one rank.

    Attributes:
        tp: tensor and sequence parallelism. Its ranks hold slices of one weight; between two
            blocks each rank has its shard of the positions, which are gathered where the weights
            multiply them.
        cp: context parallelism. Its ranks hold parts of the same sequences. Delta nets exchange
            positions for heads with them.
        key_gather: the ranks from which attention gathers keys and values: those of ``cp``. If
            keys are not gathered (ring attention, Ulysses): this rank alone.
        head_exchange: the ranks with which attention exchanges positions for heads (Ulysses): those
            of ``cp``. Without such an exchange: this rank alone.
        data: the ranks with other sequences of the same micro-batch; one communicator per mesh
            axis.
    """

    tp: Communicator = SINGLE_RANK
    cp: Communicator = SINGLE_RANK
    key_gather: Communicator = SINGLE_RANK
    head_exchange: Communicator = SINGLE_RANK
    data: tuple[Communicator, ...] = ()

    @property
    def ranks_per_sequence(self) -> int:
        """Number of ranks over which the residual stream shards a sequence's tokens: tp x cp."""
        return self.cp.num_ranks * self.tp.num_ranks

    def sum_over_sequence(self, x: Tensor) -> Tensor:
        """Return the sum of x over the tp x cp ranks that hold shards of the same sequences.

        Not differentiable.
        """
        return self.cp.all_reduce(self.tp.all_reduce(x))

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Return the sum of x over this rank and the ranks with other sequences of the micro-batch.

        Not differentiable.
        """
        for communicator in self.data:
            x = communicator.all_reduce(x)
        return x
