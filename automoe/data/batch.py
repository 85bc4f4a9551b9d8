"""One optimizer step's rows for one data-parallel rank: the contract between data and training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from automoe.moe.tokens import IGNORE as IGNORE


@dataclass
class StepBatch:
    """All micro-batches of one step for one data-parallel rank, on the CPU.

    R rows = num_micro_batches * micro_batch_size, in micro-batch order; S = seq_len. Data-parallel
    rank d of D holds rows [d*R, (d+1)*R) of the step's global batch, so the global batch does not
    depend on the mesh.
    """

    tokens: torch.Tensor  # [R, S] int64
    labels: torch.Tensor  # [R, S] int64: the next token of the same document, or IGNORE
    positions: torch.Tensor  # [R, S] int64: index within the document, for rotary embeddings
    doc_ids: torch.Tensor  # [R, S] int64: document within the row, 0, 1, ...; -1 is padding
    num_bytes: int  # UTF-8 bytes that the trained labels stand for, for bits per byte
    first_row: int  # index of row 0 in the whole training stream
