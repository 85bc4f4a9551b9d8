"""Muon over sharded matrices: momentum, orthogonalised by Newton-Schulz iterations.

Muon (Jordan 2024) in the form of Moonlight (arXiv 2502.16982, section 2.2): the update has the root
mean square of AdamW's, so learning rate and weight decay are shared with AdamW, which updates all
other parameters. ``torch.optim.Muon`` takes whole matrices only. Here a matrix is sharded over the
ranks of a pipeline stage: each matrix has one owner among the ranks that hold a block of it. An
all-to-all brings the blocks to the owners, the owners orthogonalise, and a second all-to-all takes
the blocks back. No matrix is orthogonalised twice. Parameters are processed in rounds of limited
size, so a rank holds only its whole matrices of one round at a time.

Shapes: m rows, n columns of a matrix. A stack of experts [E, 2, I, H] is E x 2 matrices [I, H].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from automoe.comm.local_shard import global_offset, local_shard
from automoe.config.facts import MUON_ROUND, MUON_STEPS
from automoe.errors import ConfigError

KEY = "momentum_buffer"  # torch.optim.Muon has the same key in its state.
# Coefficients of the quintic iteration (Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
# The root mean square of AdamW's updates, which Muon's are scaled to (arXiv 2502.16982, eq. 4).
_RMS = 0.2


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the matrices [..., m, n] with all singular values moved to about one (Newton-Schulz).

    Each is divided by its Frobenius norm, then X <- aX + (bA + cA^2)X with A = XX^T, five times.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    norm = x.to(torch.promote_types(x.dtype, torch.float32)).norm(dim=(-2, -1), keepdim=True)
    x = x / (norm + _EPS).to(x.dtype)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if tall else x


@dataclass(eq=False)
class _Matrix:
    """A matrix that one rank orthogonalises; ranks that hold blocks of it send these to that rank.

    Attributes:
        parameter: index of the parameter among those that Muon updates.
        place: index of the matrix in this rank's shard, a stack of matrices; () if the shard is
            of a single matrix.
        parts: by rank that holds a block of the matrix: the block's rows and columns.
        owner: rank that orthogonalises.
        senders: ranks whose blocks together make up the matrix; replicas send once.
    """

    parameter: int
    place: tuple[int, ...]
    parts: dict[int, tuple[slice, ...]]
    owner: int
    senders: list[int]


_Pair = tuple[_Matrix, int]  # a matrix, and a rank that holds a part of it


class Muon(torch.optim.AdamW):
    """Optimizer: Muon for parameter groups with ``muon=True``, torch's AdamW for the others.

    ``automoe.optim.adamw.build_optimizer`` creates this optimizer and its state.

    Args:
        groups: parameter groups; those of Muon hold ``momentum``.
        dtype: dtype of exchange and iterations; None: that of the parameters.
        ranks: group of this stage's ranks, which hold the blocks of the same parameters; None if
            this rank holds them whole.
        options: keyword arguments of ``torch.optim.AdamW``.

    Raises:
        ConfigError: a matrix is sharded, and ``ranks`` is None.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        dtype: torch.dtype | None,
        ranks: dist.ProcessGroup | None,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype
        self._ranks = ranks
        self._rank = 0 if ranks is None else dist.get_rank(ranks)
        self._num_ranks = 1 if ranks is None else dist.get_world_size(ranks)
        self._parameters = [
            (group, parameter)
            for group in self.param_groups
            if group.get("muon")
            for parameter in group["params"]
        ]
        sharded = (p.device_mesh.size() for _, p in self._parameters if isinstance(p, DTensor))
        if max(sharded, default=1) > self._num_ranks:
            raise ConfigError(
                "optim.algorithm",
                "muon",
                "matrices are sharded, and build_optimizer was given no group of their ranks",
                "Pass ranks=meshes.stage_group()",
            )
        mine = [_shard_slices(parameter) for _, parameter in self._parameters]
        self._shards = [mine] * self._num_ranks  # by rank, then by parameter
        if ranks is not None:
            dist.all_gather_object(self._shards, mine, group=ranks)
        self._rounds = [self._owners(indices) for indices in self._split_into_rounds()]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter with a gradient. Collective.

        The gradients of parameters that Muon updates are set to None.
        """
        for matrices in self._rounds:
            self._update(matrices)
        for _, parameter in self._parameters:
            parameter.grad = None  # AdamW leaves parameters without a gradient as they are.
        super().step()

    def _split_into_rounds(self) -> list[list[int]]:
        """Split Muon's parameters into rounds that are exchanged and orthogonalised together.

        The rounds, as indices of parameters, are the same on every rank. A round has at most
        ``MUON_ROUND`` numbers per rank (or one parameter), which bounds the memory in use.
        """
        rounds: list[list[int]] = []
        left = 0
        for i, (_, parameter) in enumerate(self._parameters):
            if parameter.numel() > left or not rounds:
                rounds.append([])
                left = MUON_ROUND * self._num_ranks
            rounds[-1].append(i)
            left -= parameter.numel()
        return rounds

    def _owners(self, indices: Sequence[int]) -> list[_Matrix]:
        """Return those matrices of the parameters ``indices`` of which this rank holds a block, with their owners.

        The owner of a matrix orthogonalises it. The order is the same on all ranks. Matrices that
        the same ranks hold go one by one to the rank with the least work so far, the largest first.

        Args:
            indices: indices of the parameters that are updated together.
        """
        by_holders: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        for i in indices:
            shards = [of_rank[i] for of_rank in self._shards]
            mine = shards[self._rank]
            for index in product(*(range(span.start, span.stop) for span in mine[:-2])):
                parts = {
                    rank: shard[-2:] for rank, shard in enumerate(shards) if _holds(shard, index)
                }
                if self._rank in parts:
                    place = tuple(at - span.start for at, span in zip(index, mine, strict=False))
                    by_holders[tuple(parts)].append((i, place, parts))
        matrices = []
        for holders, held in by_holders.items():
            work = dict.fromkeys(holders, 0)
            for i, place, parts in sorted(held, key=lambda each: (-self._work(each[0]), each[:2])):
                owner = min(holders, key=lambda rank: (work[rank], rank))
                work[owner] += self._work(i)
                by_place: dict[Any, list[int]] = defaultdict(list)
                for rank, part in parts.items():
                    by_place[tuple(span.start for span in part)].append(rank)
                # Of replicas the owner itself sends, or the one in the owner's place.
                senders = [
                    owner if owner in replicas else replicas[owner % len(replicas)]
                    for replicas in by_place.values()
                ]
                matrices.append(_Matrix(i, place, parts, owner, senders))
        return sorted(matrices, key=lambda matrix: (matrix.parameter, matrix.place))

    def _work(self, i: int) -> int:
        m, n = self._parameters[i][1].shape[-2:]
        return m * n * min(m, n)

    def _update(self, matrices: Sequence[_Matrix]) -> None:
        """Update the parameters of ``matrices`` (``_owners``): send blocks to the owner of each matrix,
        which orthogonalises it and sends them back.

        A parameter without a gradient stays as it is; no rank has a gradient for it then.
        """
        matrices = [m for m in matrices if self._parameters[m.parameter][1].grad is not None]
        updates = {i: self._momentum(i) for i in dict.fromkeys(m.parameter for m in matrices)}
        mine = {matrix: updates[matrix.parameter][matrix.place] for matrix in matrices}
        whole: dict[_Matrix, Tensor] = {}  # those that this rank owns
        pairs = [(matrix, rank) for matrix in matrices for rank in matrix.senders]
        for (matrix, rank), block in self._exchange(pairs, lambda matrix, _: mine[matrix]):
            if matrix not in whole:
                shape = self._parameters[matrix.parameter][1].shape[-2:]
                whole[matrix] = block.new_empty(shape)
            whole[matrix][matrix.parts[rank]] = block
        whole = _orthogonalize_all(whole)

        def part(matrix: _Matrix, rank: int) -> Tensor:
            return whole[matrix][matrix.parts[rank]]

        pairs = [(matrix, rank) for matrix in matrices for rank in matrix.parts]
        for (matrix, _), block in self._exchange(pairs, part, back=True):
            mine[matrix].copy_(block)
        for i, update in updates.items():
            group, parameter = self._parameters[i]
            m, n = parameter.shape[-2:]
            values = local_shard(parameter)
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.add_(update, alpha=-group["lr"] * _RMS * max(m, n) ** 0.5)

    def _momentum(self, i: int) -> Tensor:
        """Advance the momentum of Muon's parameter number ``i``; return its Nesterov update.

        It has the shape of this rank's shard and is not orthogonalised yet.
        """
        group, parameter = self._parameters[i]
        momentum = local_shard(self.state[parameter][KEY]).mul_(group["momentum"])
        gradient = local_shard(parameter.grad)
        momentum.add_(gradient)
        update = gradient.add(momentum, alpha=group["momentum"])
        return update.to(self._dtype or update.dtype)

    def _exchange(
        self, pairs: Sequence[_Pair], block_of: Callable[..., Tensor], back: bool = False
    ) -> list[tuple[_Pair, Tensor]]:
        """Send this rank's blocks of matrices to the matrices' owners, or results back. Collective.

        Args:
            pairs: (matrix, rank that holds a block of it): all pairs that this rank holds or owns;
                any two ranks list the pairs that they share in the same order.
            block_of: function (matrix, rank) that returns the block of a pair that this rank
                sends.
            back: send from the owners to the holders.

        Returns:
            The pairs whose blocks arrive at this rank, with these blocks.
        """
        held = [pair for pair in pairs if pair[1] == self._rank]
        owned = [pair for pair in pairs if pair[0].owner == self._rank]
        leaving, coming = (
            sorted(side, key=self._other) for side in ((owned, held) if back else (held, owned))
        )
        blocks = [block_of(*pair) for pair in leaving]
        if self._ranks is not None:
            sent, places, sent_sizes = self._buffer(leaving)
            for place, block in zip(places, blocks, strict=True):
                place.copy_(block)
            received, blocks, sizes = self._buffer(coming)
            dist.all_to_all_single(received, sent, sizes, sent_sizes, group=self._ranks)
        return list(zip(coming, blocks, strict=True))

    def _other(self, pair: _Pair) -> int:
        """Return the rank at the other end of the exchange of ``pair``'s block.

        A pair is a matrix and a rank that holds a block of it. If this rank is that holder, the
        other end is the matrix's owner, which orthogonalises it; else it is the holder. It is this
        rank itself if this rank is both.
        """
        matrix, rank = pair
        return matrix.owner if rank == self._rank else rank

    def _buffer(self, pairs: Sequence[_Pair]) -> tuple[Tensor, list[Tensor], list[int]]:
        """Allocate a send or receive buffer of ``_exchange`` for the blocks of ``pairs`` (matrix, rank of the holder).

        Returns:
            The buffer, flat; a view of it for each pair, in the shape of the pair's block; for each
            rank the number of entries that are sent to it or received from it.
        """
        shapes = [[span.stop - span.start for span in matrix.parts[rank]] for matrix, rank in pairs]
        sizes = [0] * self._num_ranks
        for pair, shape in zip(pairs, shapes, strict=True):
            sizes[self._other(pair)] += prod(shape)
        first = self._parameters[0][1]
        memory = torch.empty(sum(sizes), dtype=self._dtype or first.dtype, device=first.device)
        parts = memory.split([prod(shape) for shape in shapes]) if shapes else ()
        return memory, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], sizes


def _shard_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return where this rank's shard lies in the full parameter: a slice for each dim."""
    spans = zip(global_offset(parameter), local_shard(parameter).shape, strict=True)
    return tuple(slice(start, start + size) for start, size in spans)


def _holds(shard: tuple[slice, ...], index: tuple[int, ...]) -> bool:
    """Return True if ``shard`` contains a part of the matrix at ``index`` of a stack of matrices.

    Args:
        shard: the shard's range in each dim of the parameter.
        index: index in the leading dims; the last two dims are the matrix's.
    """
    inside = all(s.start <= at < s.stop for s, at in zip(shard, index, strict=False))
    return inside and all(span.start < span.stop for span in shard[-2:])


def _orthogonalize_all(whole: dict[_Matrix, Tensor]) -> dict[_Matrix, Tensor]:
    """Return the matrices of ``whole`` orthogonalised; matrices of one shape run as one batch.

    ``whole``, the numbers of the matrices that this rank owns, is emptied to free memory.
    """
    by_shape: dict[torch.Size, list[_Matrix]] = defaultdict(list)
    for matrix, values in whole.items():
        by_shape[values.shape].append(matrix)
    done: dict[_Matrix, Tensor] = {}
    for alike in by_shape.values():
        results = orthogonalize(torch.stack([whole.pop(matrix) for matrix in alike]))
        done |= zip(alike, results, strict=True)
    return done
