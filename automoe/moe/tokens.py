"""What travels beside the tokens of one micro-batch, and how a row cut over ranks is made whole.

Shapes: B rows, S positions held by this rank (the whole row unless a context axis splits it).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

IGNORE = -100  # label of a position that is not trained


class RowExchange(Protocol):
    """Makes rows whole again when several ranks hold a part of each.

    ``whole`` says that causality within the keys at hand is all an attention has to know: this rank has
    whole rows, or its attention sees to the rest itself. ``num_parts`` counts the ranks a row is cut over.
    """

    whole: bool
    num_parts: int

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] of this rank -> [B, S of all ranks, ...], differentiable, in any fixed order."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold parts of the same rows; not differentiable."""


class WholeRows:
    """The exchange of a rank that holds whole rows: nothing to do."""

    whole = True
    num_parts = 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


class TokenSplit(Protocol):
    """Cuts the tokens between two blocks over ranks that hold slices of one weight (sequence parallelism).

    S positions enter a product together; between products each rank keeps s = S / ranks of them.
    """

    num_ranks: int

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B, s, ...] -> [B, S, ...] of all ranks in order; the gradient is summed and cut."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...], this rank's term of a sum over ranks -> its part [B, s, ...] of the sum."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] that all ranks have -> this rank's [B, s, ...]; nothing travels."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; not differentiable."""

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks; not differentiable."""


class WholeTokens:
    """The split of a rank that holds whole weights: nothing to do."""

    num_ranks = 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _SplitExchange:
    """The exchange of rows whose tokens are cut once more: sums go over both."""

    whole = False

    def __init__(self, exchange: RowExchange, split: TokenSplit) -> None:
        self.exchange, self.split = exchange, split
        self.num_parts = exchange.num_parts * split.num_ranks

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchange.gather(self.split.gather(x))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchange.sum(self.split.sum(x))


class BatchSum(Protocol):
    """Adds up what the data-parallel ranks, each with rows of its own, hold at the same time."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that run a micro-batch together with this one; not differentiable."""


class WholeBatch:
    """The sum of a rank that holds all rows: nothing to do."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True)
class Rows:
    """Per-token facts that every layer and every pipeline stage needs.

    Attributes:
        positions: [B, S] index within the document, for rotary embeddings.
        index: [B, S] index within the row, for causality and for deterministic gates.
        doc_ids: [B, S] document within the row, which attention stays inside; None: it does not.
        not_padding: [B, S] bool; None: doc_ids say it with -1, and without them there is none.
        num_tokens: scalar tensor, non-padding tokens of the whole global batch; normalises balance losses.
        forced_ids: [B, S, moe layers, 2, K] routing of another run to repeat (``automoe.moe.replay``).
        exchange: how to see the rest of the rows.
        row_ids: [B, S] number of the row in the whole training stream, for noise and recorded routing.
        batch_sum: how to sum over the other rows of the micro-batch.
    """

    positions: torch.Tensor
    index: torch.Tensor
    doc_ids: torch.Tensor | None
    num_tokens: torch.Tensor
    exchange: RowExchange
    forced_ids: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None
    batch_sum: BatchSum = field(default_factory=WholeBatch)
    not_padding: torch.Tensor | None = None

    def part(self, split: TokenSplit) -> Rows:
        """The same of this rank's share of the tokens."""
        if isinstance(split, WholeTokens):
            return self
        return Rows(
            positions=split.part(self.positions),
            index=split.part(self.index),
            doc_ids=None if self.doc_ids is None else split.part(self.doc_ids),
            num_tokens=self.num_tokens,
            exchange=_SplitExchange(self.exchange, split),
            forced_ids=None if self.forced_ids is None else split.part(self.forced_ids),
            row_ids=None if self.row_ids is None else split.part(self.row_ids),
            batch_sum=self.batch_sum,
            not_padding=None if self.not_padding is None else split.part(self.not_padding),
        )

    def whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] -> [B, R, ...], the whole rows in order of ``index``; not differentiable.

        Parts are written into zeros and summed, which is exact and needs no order among the ranks.
        """
        if self.exchange.num_parts == 1:
            return x  # a rank with whole rows holds them in order
        batch, size = self.index.shape
        full = x.new_zeros(batch, size * self.exchange.num_parts, *x.shape[2:])
        rows = torch.arange(batch, device=x.device).unsqueeze(1)
        full[rows, self.index] = x.detach()
        return self.exchange.sum(full)

    @property
    def valid(self) -> torch.Tensor:
        """[B, S] True where the token is not padding."""
        if self.not_padding is not None:
            return self.not_padding
        if self.doc_ids is None:
            return torch.ones_like(self.index, dtype=torch.bool)
        return self.doc_ids >= 0
