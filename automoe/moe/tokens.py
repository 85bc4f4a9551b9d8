"""What travels with the tokens of a micro-batch, as tensors.

Shapes: B rows, S positions held by this rank (the whole row unless ranks share it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from automoe.moe.process_groups import Communicator

IGNORE = -100  # label of a position that is not trained


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of the whole global batch, int64 scalars: what a step's losses are divided by.

    No tensor itself and no container that torch knows, so pipeline schedules hand it to every
    micro-batch as it is.

    Attributes:
        trained: tokens with a label; the divisor of the cross-entropy.
        non_padding: tokens that are not padding; the divisor of balance losses.
        documents: those with a label; the divisor of losses that are means over them.
    """

    trained: torch.Tensor
    non_padding: torch.Tensor
    documents: torch.Tensor


def num_documents(labels: torch.Tensor, doc_ids: torch.Tensor | None) -> torch.Tensor:
    """Documents of whole rows, labels and doc_ids [B, S], that have a label: an int64 scalar."""
    trained = (labels >= 0).long()
    if doc_ids is None:
        return trained.amax(1).sum()
    return torch.zeros_like(trained).scatter_reduce_(1, doc_ids.clamp_min(0), trained, "amax").sum()


@dataclass(frozen=True)
class Tokens:
    """Per-token tensors that every layer and every pipeline stage needs.

    Attributes:
        positions: [B, S] index within the document, for rotary embeddings.
        index: [B, S] index within the row, for causality and for deterministic gates.
        doc_ids: [B, S] document within the row, which attention stays inside; None: it does not.
        num_tokens: scalar tensor, non-padding tokens of the whole global batch; normalises balance
            losses.
        forced_ids: [B, S, moe layers, 2, K] routing of another run to repeat
            (``automoe.training.routing``).
        row_ids: [B, S] number of the row in the whole training stream, for noise and recorded
            routing.
        not_padding: [B, S] bool; None: doc_ids say it with -1, and without them there is none.
    """

    positions: torch.Tensor
    index: torch.Tensor
    doc_ids: torch.Tensor | None
    num_tokens: torch.Tensor
    forced_ids: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None
    not_padding: torch.Tensor | None = None

    def local_shard(self, sequence: Communicator) -> Tokens:
        """The same of this rank's shard of the positions."""
        if sequence.num_ranks == 1:
            return self
        per_token = {
            name: value
            for name, value in vars(self).items()
            if name != "num_tokens" and value is not None
        }
        return replace(
            self, **{name: sequence.local_shard(value) for name, value in per_token.items()}
        )

    @property
    def valid(self) -> torch.Tensor:
        """[B, S] True where the token is not padding."""
        if self.not_padding is not None:
            return self.not_padding
        if self.doc_ids is None:
            return torch.ones_like(self.index, dtype=torch.bool)
        return self.doc_ids >= 0
