"""Kernels for ``kernels.loss=triton``: cross-entropy that passes over the logits twice.

One pass reads them for each token's largest logit and sum of exponentials, the other replaces them
by their gradient. ``automoe.model.loss.chunk_loss`` passes over them seven times.

Letters: T tokens, H hidden, V vocabulary (this rank's part of it).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from automoe.kernels.served import check_served
from automoe.model.loss import targets
from automoe.moe.process_groups import Communicator

BLOCK = 4096  # logits that a program, which has one token, reads at once
WARPS = 8


@triton.jit
def _sums(logits, largests, sums, vocabulary, BLOCK: tl.constexpr):
    """Store a token's largest logit, and its sum of exp(logit - largest)."""
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
    """Replace a token's logits by exp(logit - largest) * factor, less 1 at its label."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * vocabulary + at
    logit = tl.load(place, mask=at < vocabulary, other=0.0).to(tl.float32)
    gradient = tl.exp(logit - tl.load(largests + row)) * tl.load(factors + row)
    gradient = tl.where(at == tl.load(labels + row), gradient - 1.0, gradient)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=at < vocabulary)


def chunk_loss(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_T: torch.Tensor,
    first_id: int,
    vocab: Communicator,
    wanted: bool,
    hits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what ``automoe.model.loss.chunk_loss`` returns, for the same arguments."""
    check_served(x_TH, "kernels.loss=triton", "kernels.loss=torch", "kernels.loss=torch")
    trained_T1, target_T1, here_T1 = targets(labels_T, weight_VH, first_id)
    logits_TV = x_TH @ weight_VH.T
    num_tokens, vocabulary = logits_TV.shape
    mine_T1, sum_T1 = (
        torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TH.device) for _ in range(2)
    )
    _sums[(num_tokens,)](logits_TV, mine_T1, sum_T1, vocabulary, BLOCK=BLOCK, num_warps=WARPS)
    largest_T1 = vocab.all_reduce_max(mine_T1)
    target_logit_T1 = vocab.all_reduce(logits_TV.gather(1, target_T1).float() * here_T1)
    divisor_T1 = vocab.all_reduce(sum_T1 * (mine_T1 - largest_T1).exp_())
    if hits is not None:
        hits += (trained_T1 & (target_logit_T1 == largest_T1)).sum()
    loss = ((divisor_T1.log() + largest_T1 - target_logit_T1) * trained_T1).sum()
    if not wanted:
        return loss, None
    places = triton.cdiv(vocabulary, BLOCK)
    labels_T1 = torch.where(here_T1, target_T1, -1)
    _gradients[(num_tokens, places)](
        logits_TV, largest_T1, trained_T1 / divisor_T1, labels_T1, vocabulary,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return loss, logits_TV
