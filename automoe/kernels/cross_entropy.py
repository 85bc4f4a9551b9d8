"""Kernels for ``kernels.loss=triton``: cross-entropy that passes over the logits twice.

The first pass computes each token's largest logit and sum of exponentials, the second replaces the
logits by their gradient. In plain torch, ``automoe.model.loss.chunk_loss`` makes seven passes.

Letters: T tokens, V vocabulary (this rank's shard of it).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from automoe.kernels.served import check_served

BLOCK = 4096  # logits that a program reads at once; each program has one token
WARPS = 8


@triton.jit
def _sums(logits, largests, sums, vocabulary, BLOCK: tl.constexpr):
    """Triton kernel: store each token's largest logit, and its sum of exp(logit - largest).

    Results go to ``largests`` and ``sums``, one entry per token. One program handles one token, and
    reads its ``vocabulary`` logits BLOCK at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf"))
        logit = logit.to(tl.float32)
        # NaN is kept: a comparison with it is false.
        higher = tl.where(largest > logit, largest, logit)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.exp(logit - base)
        largest = higher
    of_row = tl.max(largest)
    total = tl.sum(total * tl.exp(largest - of_row))
    tl.store(largests + row, of_row)
    tl.store(sums + row, total)


@triton.jit
def _gradients(logits, largests, factors, labels, vocabulary, BLOCK: tl.constexpr):
    """Triton kernel: replace logits by exp(logit - largest) * factor, minus 1 at the label.

    One program handles BLOCK of the ``vocabulary`` logits of one token; ``largests``, ``factors``
    and ``labels`` have one entry per token. A label of -1 is not in these logits.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * vocabulary + at
    logit = tl.load(place, mask=at < vocabulary, other=0.0).to(tl.float32)
    gradient = tl.exp(logit - tl.load(largests + row)) * tl.load(factors + row)
    gradient = tl.where(at == tl.load(labels + row), gradient - 1.0, gradient)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=at < vocabulary)


def row_sums(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's largest logit, and its sum of exp(logit - largest): float32 [T, 1].

    Raises:
        BackendError: the logits are on the CPU, or not bfloat16, float16 or float32.
    """
    check_served(logits_TV, "kernels.loss")
    num_tokens, vocabulary = logits_TV.shape
    largest_T1, sum_T1 = (
        torch.empty(num_tokens, 1, dtype=torch.float32, device=logits_TV.device) for _ in range(2)
    )
    _sums[(num_tokens,)](logits_TV, largest_T1, sum_T1, vocabulary, BLOCK=BLOCK, num_warps=WARPS)
    return largest_T1, sum_T1


def logits_to_gradient_(
    logits_TV: Tensor, largest_T1: Tensor, factor_T1: Tensor, label_T1: Tensor
) -> Tensor:
    """Replace logits in place by exp(logit - largest) * factor, minus 1 at the label.

    With factor = 1 / (sum of exponentials), this is the gradient of the cross-entropy.

    Args:
        logits_TV: contiguous logits; also the result.
        largest_T1: number to subtract from a token's logits: the largest over the whole vocabulary.
        factor_T1: factor of a token's exponentials.
        label_T1: index of the label in V; -1: no label in this rank's shard of the vocabulary.
    """
    num_tokens, vocabulary = logits_TV.shape
    _gradients[(num_tokens, triton.cdiv(vocabulary, BLOCK))](
        logits_TV, largest_T1, factor_T1, label_T1, vocabulary, BLOCK=BLOCK, num_warps=WARPS
    )
    return logits_TV
