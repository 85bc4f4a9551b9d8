"""The micro-batch that a model is called with, its per-token tensors and token counts.

Shapes: B sequences, S positions held by this rank (the whole sequence unless ranks share it), D
modules for multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.export import register_dataclass

from automoe.comm.communicators import Communicator
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

    trained: Tensor
    non_padding: Tensor
    documents: Tensor
    mtp: Tensor | None = None


def num_documents(labels: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Return the number of documents with a label: an int64 scalar.

    Args:
        labels: [B, S] labels of whole sequences, not of a cp rank's part; below 0 is none.
        doc_ids: [B, S] index of the document within its sequence; None: a sequence is one document.
    """
    trained = (labels >= 0).long()
    if doc_ids is None:
        return trained.amax(1).sum()
    return torch.zeros_like(trained).scatter_reduce_(1, doc_ids.clamp_min(0), trained, "amax").sum()


def count_shifted(tokens_BSD: Tensor, labels_BSD: Tensor) -> Tensor:
    """Return the numbers of labels and of input tokens at each depth of multi-token prediction.

    Negative labels and tokens stand for none and are not counted. The result is [D, 2] int64.
    """
    counted = torch.stack((labels_BSD >= 0, tokens_BSD >= 0), dim=-1)
    return counted.sum((0, 1))


@dataclass(frozen=True)
class Tokens:
    """Per-token tensors that every layer and every pipeline stage needs.

    B packed sequences, S positions of this rank.

    Attributes:
        positions: [B, S] index within the document, for rotary embeddings.
        index: [B, S] index within the sequence, for causal masks, and for ``moe.gate`` settings
            that choose experts by it.
        doc_ids: [B, S] document within the sequence, to which attention is confined; None:
            attention spans the whole sequence.
        num_tokens: scalar tensor, non-padding tokens of the whole global batch; normalises balance
            losses.
        forced_ids: [B, S, L, n, K] routing to repeat in L MoE layers: expert ids, -1 where the
            router itself chooses. A recorded run has n = 2: chosen experts, and the top-k of
            scores without expert bias and groups; an inference engine has n = 1: chosen experts.
            None: routers choose.
        row_ids: [B, S] number of the sequence in the whole training stream, for the router's jitter
            and recorded routing.
        not_padding: [B, S] bool; None: padding has the document -1, and without doc_ids no token is
            padding.
        ids: [B, S] token ids, for experts that a table selects.
    """

    positions: Tensor
    index: Tensor
    doc_ids: Tensor | None
    num_tokens: Tensor
    forced_ids: Tensor | None = None
    row_ids: Tensor | None = None
    not_padding: Tensor | None = None
    ids: Tensor | None = None

    def local_shard(self, tp: Communicator) -> Tokens:
        """Return these tensors for this rank's shard [B, S / ranks of ``tp``] of the positions."""
        if tp.num_ranks == 1:
            return self
        shards = {
            name: tp.local_shard(value)
            for name, value in vars(self).items()
            if name != "num_tokens" and value is not None
        }
        return replace(self, **shards)

    @property
    def valid(self) -> Tensor:
        """[B, S] bool, True for tokens that are not padding."""
        if self.not_padding is not None:
            return self.not_padding
        if self.doc_ids is None:
            return torch.ones_like(self.index, dtype=torch.bool)
        return self.doc_ids >= 0


@dataclass
class StepBatch:
    """All micro-batches of one step for one data-parallel rank, as CPU tensors.

    R = num_micro_batches * micro_batch_size = global_batch_size / D packed sequences, in
    micro-batch order; S = seq_len; P preference pairs in a sequence. Data-parallel rank d of D
    holds sequences [d*R, (d+1)*R) of the step's global batch. Tensors are int64.

    Attributes:
        tokens: [R, S].
        labels: [R, S] the next token of the same document, or ``IGNORE``.
        positions: [R, S] index within the document, for rotary embeddings.
        doc_ids: [R, S] index of the document within its sequence; -1 is padding.
        num_bytes: UTF-8 bytes of the text that the labels stand for; bits per byte needs them.
        first_row: number of the first sequence in the whole training stream.
        pairs: [R, P] index of each preference pair in the data of all sources. The answers of
            column p are the documents 2 p and 2 p + 1; -1 where a sequence has fewer pairs. None:
            no preference data.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    doc_ids: Tensor
    num_bytes: int
    first_row: int
    pairs: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that a model is called with: one micro-batch, or all micro-batches of a step.

    A step's sequences are split along B, and every pipeline stage gets the same micro-batch.

    Attributes:
        tokens: [B, S] int64, which the stage with the embedding reads.
        labels: [B, S] next tokens, for the loss; ``IGNORE`` marks positions that are not trained.
            None: no loss is computed.
        index: [B, S] index within the sequence; None: 0 ... S-1.
        positions: [B, S] index within the document, for rotary embeddings; None: the index.
        doc_ids: [B, S] index of the document within the sequence, -1 for padding; None: a sequence
            is one document.
        row_ids: [B, S] number of the sequence in the training stream; None: 0 ... B-1.
        not_padding: [B, S] bool; None: all tokens but those of document -1.
        forced_ids: [B, S, L, n, K] routing to repeat (``Tokens.forced_ids``); None: routers choose.
        mtp_tokens, mtp_labels: [B, S, D] tokens that each depth of multi-token prediction reads,
            and its labels (``automoe.model.mtp.shift_rows``); None: no depth runs.
        next_token_at: [B, S] bool, equal on all ranks that share the vocabulary: positions for
            which the head returns the likeliest next token; None: it returns a loss or logits.
        counts: counts of the global batch, which losses are divided by; None: these B sequences
            are counted (``known_counts``).
        given: [B, ...] further inputs of the loss, by name.
    """

    tokens: Tensor
    labels: Tensor | None = None
    positions: Tensor | None = None
    index: Tensor | None = None
    doc_ids: Tensor | None = None
    row_ids: Tensor | None = None
    not_padding: Tensor | None = None
    forced_ids: Tensor | None = None
    mtp_tokens: Tensor | None = None
    mtp_labels: Tensor | None = None
    next_token_at: Tensor | None = None
    counts: TokenCounts | None = None
    given: Mapping[str, Tensor] = field(default_factory=dict)

    def __or__(self, given: Mapping[str, Tensor]) -> MicroBatch:
        """Return this micro-batch with further inputs of the loss: tensors [B, ...] by name."""
        return replace(self, given={**self.given, **given})

    def per_token(self, num_tokens: Tensor) -> Tokens:
        """Return the per-token tensors that all layers read, defaults filled in.

        Args:
            num_tokens: scalar tensor, non-padding tokens of the whole global batch.
        """
        tokens, index, row_ids = self.tokens, self.index, self.row_ids
        if index is None:
            index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if row_ids is None:
            row_ids = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
            row_ids = row_ids.expand_as(tokens)
        positions = index if self.positions is None else self.positions
        rest = self.forced_ids, row_ids, self.not_padding, tokens
        return Tokens(positions, index, self.doc_ids, num_tokens, *rest)

    def known_counts(self) -> TokenCounts:
        """Return the counts of tokens with a label, of non-padding tokens, and of documents with a label.

        Losses are divided by them. They are the field ``counts`` (of the global batch), or, if that
        is None, those of this micro-batch alone. If counts of multi-token prediction are missing,
        they are counted in this micro-batch too.
        """
        counts = self.counts
        if counts is None:
            trained = documents = torch.zeros((), dtype=torch.int64, device=self.tokens.device)
            valid = self.per_token(trained).valid.sum()
            if self.labels is not None:
                trained = (self.labels >= 0).sum()
                documents = num_documents(self.labels, self.doc_ids)
            counts = TokenCounts(trained, valid, documents)
        if self.mtp_tokens is not None and self.mtp_labels is not None and counts.mtp is None:
            counts = replace(counts, mtp=count_shifted(self.mtp_tokens, self.mtp_labels))
        return counts


register_dataclass(MicroBatch)  # TokenCounts stays one value, equal in all parts
