"""Per-token tensors and token counts that travel with a micro-batch.

Shapes: B rows, S positions held by this rank (the whole row unless ranks share it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from automoe.comm.process_groups import Communicator
from automoe.config.data_schema import IGNORE as IGNORE


@dataclass(frozen=True)
class TokenCounts:
    """Counts over the global batch by which a step's losses are divided, as int64 scalars.

    The class is neither a tensor nor a container that torch splits, so pipeline schedules pass it
    unchanged to every micro-batch.

    Attributes:
        trained: number of tokens with a label; the divisor of the cross-entropy.
        non_padding: number of tokens that are not padding; the divisor of balance losses.
        documents: number of documents with a label; the divisor of losses that are means over
            documents.
        mtp: [D, 2] of every depth of multi-token prediction: tokens with a label, and tokens that
            are not padding; None: these are not known.
    """

    trained: torch.Tensor
    non_padding: torch.Tensor
    documents: torch.Tensor
    mtp: torch.Tensor | None = None


def num_documents(labels: torch.Tensor, doc_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the number of documents with a label, in whole rows: an int64 scalar.

    Args:
        labels: [B, S] labels.
        doc_ids: [B, S] document within the row; None: a row is one document.
    """
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
        doc_ids: [B, S] document within the row, to which attention is confined; None: attention
            spans the whole row.
        num_tokens: scalar tensor, non-padding tokens of the whole global batch; normalises balance
            losses.
        forced_ids: [B, S, moe layers, 2, K] recorded routing to repeat
            (``automoe.training.routing``).
        row_ids: [B, S] number of the row in the whole training stream, for noise and recorded
            routing.
        not_padding: [B, S] bool; None: padding has the document -1, and without doc_ids no token is
            padding.
    """

    positions: torch.Tensor
    index: torch.Tensor
    doc_ids: torch.Tensor | None
    num_tokens: torch.Tensor
    forced_ids: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None
    not_padding: torch.Tensor | None = None

    def local_shard(self, sequence: Communicator) -> Tokens:
        """Return these tensors for this rank's shard of the positions."""
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
        """[B, S] bool, True for tokens that are not padding."""
        if self.not_padding is not None:
            return self.not_padding
        if self.doc_ids is None:
            return torch.ones_like(self.index, dtype=torch.bool)
        return self.doc_ids >= 0
