"""Cross-entropy of the vocabulary head without ever holding all logits.

Shapes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from automoe.config.schema import chunk_tokens
from automoe.moe.communicators import SINGLE_RANK, Communicator
from automoe.moe.tokens import IGNORE

# x [t, H] of one chunk, weight, labels [t], first_id and vocab of ``cross_entropy_sum``, whether a gradient is
# wanted -> the sum of the chunk's losses, and its gradient by the logits [t, V] in the dtype of x
ChunkLoss = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, Communicator, bool],
    tuple[torch.Tensor, torch.Tensor | None],
]


def chunk_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    first_id: int,
    vocab: Communicator,
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A ``ChunkLoss``, operation by operation."""
    trained = (labels != IGNORE).unsqueeze(1)
    # Under tensor parallelism this rank has some rows of the vocabulary, and the label may be elsewhere.
    target = (labels - first_id).unsqueeze(1)
    here = trained & (target >= 0) & (target < weight.shape[0])
    target = target.clamp(0, weight.shape[0] - 1)
    logits = x @ weight.T
    wide = torch.promote_types(x.dtype, torch.float32)
    largest = vocab.all_reduce_max(logits.amax(-1, keepdim=True).to(wide))
    of_target = vocab.all_reduce(logits.gather(1, target).to(wide) * here)
    # Softmax but for its divisor. Passes over memory are what counts: widened by the subtraction, narrowed by the product.
    grad = (logits.sub_(largest) if logits.dtype == wide else logits - largest).exp_()
    divisor = vocab.all_reduce(grad.sum(-1, keepdim=True))
    loss = ((divisor.log() + largest - of_target) * trained).sum()
    if not wanted:
        return loss, None
    factor = trained / divisor
    of_target = grad.gather(1, target) * factor - here.to(wide)
    grad = torch.mul(grad, factor, out=logits)
    return loss, grad.scatter_(1, target, of_target.to(grad.dtype))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Both gradients are computed beside the loss, a chunk of logits at a time, and scaled in backward."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        first_id: int,
        vocab: Communicator,
        of_chunk: ChunkLoss,
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if needs_x else None
        # Many chunks are added up, so the sum is kept wide whatever the weight's dtype.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        step = chunk_tokens(*x.shape)
        for start in range(0, x.shape[0], step):
            chunk, chunk_labels = x[start : start + step], labels[start : start + step]
            loss, grad = of_chunk(chunk, weight, chunk_labels, first_id, vocab, needs_x or needs_weight)
            total += loss
            if grad is None:
                continue
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[start : start + step])
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, chunk)
            elif grad_weight is not None:
                grad_weight += grad.T @ chunk
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype) if grad_weight is not None else None)
        return total

    @staticmethod
    def backward(ctx, grad_total: torch.Tensor):
        grad_x, grad_weight = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * grad_total.to(grad_x.dtype),
            None if grad_weight is None else grad_weight * grad_total.to(grad_weight.dtype),
            None,
            None,
            None,
            None,
        )


def cross_entropy_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    first_id: int = 0,
    vocab: Communicator = SINGLE_RANK,
    of_chunk: ChunkLoss = chunk_loss,
) -> torch.Tensor:
    """Sum over trained tokens of -log softmax(x @ weight.T)[label].

    Args:
        x: [T, H] final hidden states.
        weight: [V, H] vocabulary head, or this rank's rows of it.
        labels: [T] int64; ``IGNORE`` marks positions that are not trained.
        first_id: token id of the weight's first row.
        vocab: the ranks that hold the other rows, all with the same x and labels. Every one of them returns the whole loss; their gradients of x are terms of a sum.
        of_chunk: what computes a chunk, compiled perhaps.

    Returns:
        Scalar in at least float32, in nats; not divided by any count.
    """
    return _ChunkedCrossEntropy.apply(x, weight, labels, first_id, vocab, of_chunk)
