"""Cross-entropy of the vocabulary head without ever holding all logits.

Letters: T tokens, H hidden, V vocabulary (this rank's part of it).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from automoe.config.schema import chunk_tokens
from automoe.moe.communicators import SINGLE_RANK, Communicator
from automoe.moe.tokens import IGNORE

ChunkLoss = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # ``chunk_loss``, or what computes the same


def chunk_loss(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_T: torch.Tensor,
    first_id: int,
    vocab: Communicator,
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of a chunk's losses, and if ``wanted`` its gradient by the logits [T, V] in the dtype of x.

    x, labels [T] and the rest as ``cross_entropy_sum`` takes them.
    """
    trained_T1 = (labels_T != IGNORE).unsqueeze(1)
    # Under tensor parallelism this rank has some rows of the vocabulary, and the label may be elsewhere.
    target_T1 = (labels_T - first_id).unsqueeze(1)
    here_T1 = trained_T1 & (target_T1 >= 0) & (target_T1 < weight_VH.shape[0])
    target_T1 = target_T1.clamp(0, weight_VH.shape[0] - 1)
    logits_TV = x_TH @ weight_VH.T
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    largest_T1 = vocab.all_reduce_max(logits_TV.amax(-1, keepdim=True).to(wide))
    target_logit_T1 = vocab.all_reduce(logits_TV.gather(1, target_T1).to(wide) * here_T1)
    # Softmax but for its divisor. Passes over memory are what counts: the subtraction widens, the product narrows.
    grad_TV = (logits_TV.sub_(largest_T1) if logits_TV.dtype == wide else logits_TV - largest_T1).exp_()
    divisor_T1 = vocab.all_reduce(grad_TV.sum(-1, keepdim=True))
    loss = ((divisor_T1.log() + largest_T1 - target_logit_T1) * trained_T1).sum()
    if not wanted:
        return loss, None
    factor_T1 = trained_T1 / divisor_T1
    target_grad_T1 = grad_TV.gather(1, target_T1) * factor_T1 - here_T1.to(wide)
    grad_TV = torch.mul(grad_TV, factor_T1, out=logits_TV)
    return loss, grad_TV.scatter_(1, target_T1, target_grad_T1.to(grad_TV.dtype))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Both gradients are computed with the loss, a chunk of logits at a time, and scaled in backward."""

    @staticmethod
    def forward(
        ctx, x_TH, weight_VH, labels_T, first_id: int, vocab: Communicator, chunk_fn: ChunkLoss
    ) -> torch.Tensor:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=wide, device=x_TH.device)
        grad_x_TH = torch.empty_like(x_TH) if needs_x else None
        # Many chunks are added up, so the sum is kept wide whatever the weight's dtype.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        step = chunk_tokens(*x_TH.shape)
        for start in range(0, x_TH.shape[0], step):
            chunk, chunk_labels = x_TH[start : start + step], labels_T[start : start + step]
            loss, grad_TV = chunk_fn(chunk, weight_VH, chunk_labels, first_id, vocab, needs_x or needs_weight)
            total += loss
            if grad_TV is None:
                continue
            if grad_x_TH is not None:
                torch.mm(grad_TV, weight_VH, out=grad_x_TH[start : start + step])
            if grad_weight_VH is not None and grad_weight_VH.dtype == grad_TV.dtype:
                grad_weight_VH.addmm_(grad_TV.T, chunk)
            elif grad_weight_VH is not None:
                grad_weight_VH += grad_TV.T @ chunk
        ctx.save_for_backward(grad_x_TH, grad_weight_VH.to(weight_VH.dtype) if grad_weight_VH is not None else None)
        return total

    @staticmethod
    def backward(ctx, grad_total: torch.Tensor):
        scaled = (None if grad is None else grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors)
        return *scaled, None, None, None, None


def cross_entropy_sum(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_T: torch.Tensor,
    first_id: int = 0,
    vocab: Communicator = SINGLE_RANK,
    chunk_fn: ChunkLoss = chunk_loss,
) -> torch.Tensor:
    """Sum over trained tokens of -log softmax(x @ weight.T)[label].

    Args:
        x_TH: final hidden states.
        weight_VH: vocabulary head, or this rank's rows of it.
        labels_T: int64; ``IGNORE`` marks positions that are not trained.
        first_id: token id of the weight's first row.
        vocab: the ranks that hold the other rows, all with the same x and labels. Every one of them returns the
            whole loss; their gradients of x are terms of a sum.
        chunk_fn: computes a chunk, compiled perhaps.

    Returns:
        Scalar in at least float32, in nats; not divided by any count.
    """
    return _ChunkedCrossEntropy.apply(x_TH, weight_VH, labels_T, first_id, vocab, chunk_fn)
