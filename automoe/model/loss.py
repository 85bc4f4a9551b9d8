"""Losses of the vocabulary head that never hold all logits.

The file computes cross-entropy, and the token losses that ``train.loss`` reduces. Letters: T
tokens, H hidden, V vocabulary (this rank's part of it), B rows, S positions of this rank, D
documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from automoe.comm.communicators import SINGLE_RANK, Communicator
from automoe.comm.tokens import IGNORE, TokenCounts
from automoe.config.rules_kernels import chunk_tokens
from automoe.errors import import_backend
from automoe.kernels.logits import cap_logits, scaled
from automoe.kernels.row_sums import sum_within_rows

NAN_TOKEN = -1  # marks a next token whose logits are NaN
# A function with the signature of ``chunk_loss``.
ChunkLoss = Callable[..., tuple[Tensor, Tensor | None]]


def chunk_loss(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    first_id: int,
    vocab: Communicator,
    wanted: bool,
    hits: Tensor | None = None,
    soft_cap: float = 0.0,
    in_kernels: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of a chunk's cross-entropies and its gradient [T, V] with respect to logits.

    Args:
        x_TH: final hidden states of the chunk.
        weight_VH: vocabulary head, or this rank's rows of it, the first of them of token
            ``first_id``.
        labels_T: int64; ``IGNORE`` marks tokens that are not trained.
        vocab: the ranks that hold the other rows of the head; all of them call together.
        wanted: whether the gradient is computed, in the dtype of x; else it is None.
        hits: int64 scalar to which the number of labels that are the likeliest token is added.
        soft_cap: bound of the logits (``cap_logits``); 0: none.
        in_kernels: use Triton kernels (``kernels.loss=triton``).
    """
    trained_T1, target_T1, here_T1 = _targets(labels_T, weight_VH, first_id)
    logits_TV, slope_TV = cap_logits(x_TH @ weight_VH.T, soft_cap)
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    if in_kernels:
        from automoe.kernels.cross_entropy import logits_to_gradient_, row_sums

        mine_T1, sum_T1 = row_sums(logits_TV)
    else:
        mine_T1 = logits_TV.amax(-1, keepdim=True).to(wide)
    largest_T1 = vocab.all_reduce_max(mine_T1)
    target_logit_T1 = vocab.all_reduce(logits_TV.gather(1, target_T1).to(wide) * here_T1)
    if hits is not None:
        hits += (trained_T1 & (target_logit_T1 == largest_T1)).sum()
    if in_kernels:
        sum_T1 *= (mine_T1 - largest_T1).exp_()
    else:
        # Softmax without its divisor. Passes over memory are the cost, so the subtraction also
        # widens, and the product below also narrows.
        grad_TV = (
            logits_TV.sub_(largest_T1) if logits_TV.dtype == wide else logits_TV - largest_T1
        ).exp_()
        sum_T1 = grad_TV.sum(-1, keepdim=True)
    divisor_T1 = vocab.all_reduce(sum_T1)
    loss = ((divisor_T1.log() + largest_T1 - target_logit_T1) * trained_T1).sum()
    if not wanted:
        return loss, None
    factor_T1 = trained_T1 / divisor_T1
    if in_kernels:
        label_T1 = torch.where(here_T1, target_T1, -1)
        grad_TV = logits_to_gradient_(logits_TV, largest_T1, factor_T1, label_T1)
    else:
        target_grad_T1 = grad_TV.gather(1, target_T1) * factor_T1 - here_T1.to(wide)
        grad_TV = torch.mul(grad_TV, factor_T1, out=logits_TV)
        grad_TV.scatter_(1, target_T1, target_grad_T1.to(grad_TV.dtype))
    return loss, grad_TV if slope_TV is None else (grad_TV * slope_TV).to(x_TH.dtype)


def _chunks(x_TH: Tensor) -> Iterator[slice]:
    step = chunk_tokens(*x_TH.shape)
    return (slice(start, start + step) for start in range(0, len(x_TH), step))


def _trained_chunks(x_TH: Tensor, labels_T: Tensor, skips: bool) -> Sequence[slice | Tensor]:
    """Return chunks of the tokens to compute: indices of trained tokens only, or slices of all tokens.

    All are computed if ``skips`` is False, and on a GPU, where the host would wait for the indices.
    """
    if x_TH.is_cuda or not skips:
        return [*_chunks(x_TH)]
    trained = (labels_T != IGNORE).nonzero().squeeze(1)
    return trained.split(chunk_tokens(len(trained), x_TH.shape[1]))[: len(trained)]


def _targets(labels_T: Tensor, weight_VH: Tensor, first_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find each label in this rank's rows of the vocabulary head, which begin at id ``first_id``.

    Returns:
        Three [T, 1]: whether the token is trained; its label's row in ``weight_VH``, clamped to the
        rows that exist; whether this rank holds that row.
    """
    trained_T1 = (labels_T != IGNORE).unsqueeze(1)
    # Under tensor parallelism another rank may have the label's row of the vocabulary.
    target_T1 = (labels_T - first_id).unsqueeze(1)
    here_T1 = trained_T1 & (target_T1 >= 0) & (target_T1 < weight_VH.shape[0])
    return trained_T1, target_T1.clamp(0, weight_VH.shape[0] - 1), here_T1


def _new_gradients(ctx, x_TH, weight_VH, wide: torch.dtype, new=torch.empty_like):
    """Return ``new(x)`` and zeros like the weight of dtype ``wide``, to hold their gradients; None: not needed."""
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    grad_x_TH = new(x_TH) if needs_x else None
    return grad_x_TH, torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None


def _add_gradients(
    grad_TV: Tensor,
    x_TH: Tensor,
    weight_VH: Tensor,
    grad_x_TH: Tensor | None,
    grad_weight_VH: Tensor | None,
    chunk: slice | Tensor,
) -> None:
    """Write x's gradient for the tokens of ``chunk``; add their term to the weight's gradient.

    Args:
        grad_TV: gradient of the logits of the chunk's tokens; x and its gradient are of all tokens.
        grad_x_TH, grad_weight_VH: gradients that change in place; None: not needed.
        chunk: range or indices of the tokens.
    """
    if grad_x_TH is not None and isinstance(chunk, slice):
        torch.mm(grad_TV, weight_VH, out=grad_x_TH[chunk])
    elif grad_x_TH is not None:
        grad_x_TH[chunk] = grad_TV @ weight_VH
    if grad_weight_VH is not None and grad_weight_VH.dtype == grad_TV.dtype:
        grad_weight_VH.addmm_(grad_TV.T, x_TH[chunk])
    elif grad_weight_VH is not None:
        grad_weight_VH += grad_TV.T @ x_TH[chunk]


def chunk_loss_fn(kernel: str) -> ChunkLoss:
    """Return a function with the arguments of ``chunk_loss``, computed by ``kernel``: ``torch`` or ``triton``.

    Raises:
        BackendError: ``kernels.loss=triton``, and the package is missing.
    """
    if kernel == "torch":
        return chunk_loss
    assert kernel == "triton"
    import_backend("triton", "kernels.loss=triton", "Install it, or set kernels.loss=torch")
    return partial(chunk_loss, in_kernels=True)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Autograd function of ``cross_entropy_sum``; its forward computes the gradients of x and weight.

    It computes a chunk of logits at a time. The backward only scales the gradients.
    """

    @staticmethod
    def forward(
        ctx,
        x_TH,
        weight_VH,
        labels_T,
        first_id: int,
        vocab: Communicator,
        chunk_fn: ChunkLoss,
        hits,
        soft_cap: float,
    ):
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x_TH.device)
        grad_x_TH, grad_weight_VH = _new_gradients(ctx, x_TH, weight_VH, wide)
        wanted = any(ctx.needs_input_grad[:2])
        for chunk in _chunks(x_TH):
            loss, grad_TV = chunk_fn(
                x_TH[chunk], weight_VH, labels_T[chunk], first_id, vocab, wanted, hits, soft_cap
            )
            total += loss
            if grad_TV is not None:
                _add_gradients(grad_TV, x_TH, weight_VH, grad_x_TH, grad_weight_VH, chunk)
        ctx.save_for_backward(
            grad_x_TH, grad_weight_VH.to(weight_VH.dtype) if grad_weight_VH is not None else None
        )
        return total

    @staticmethod
    def backward(ctx, grad_total):
        return *(scaled(grad, grad_total) for grad in ctx.saved_tensors), *(None,) * 6


def cross_entropy_sum(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    first_id: int = 0,
    vocab: Communicator = SINGLE_RANK,
    chunk_fn: ChunkLoss = chunk_loss,
    hits: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return the sum over trained tokens of -log softmax(x @ weight.T)[label].

    Args:
        x_TH: final hidden states.
        weight_VH: vocabulary head, or this rank's rows of it.
        labels_T: int64; ``IGNORE`` marks positions that are not trained.
        first_id: token id of the weight's first row.
        vocab: the ranks that hold the other rows, all with the same x and labels. Each of these
            ranks returns the whole loss; their gradients of x are terms of a sum.
        chunk_fn: function with the arguments and results of ``chunk_loss``, which computes a chunk.
        hits: int64 scalar to which the number of labels that are the likeliest token is added.
        soft_cap: bound of the logits (``cap_logits``); 0: none.

    Returns:
        Scalar in at least float32, in nats; not divided by any count.
    """
    if not torch.is_grad_enabled():  # a parameter alone asks for its gradient even then
        x_TH, weight_VH = x_TH.detach(), weight_VH.detach()
    head = x_TH, weight_VH, labels_T, first_id, vocab
    return _ChunkedCrossEntropy.apply(*head, chunk_fn, hits, soft_cap)


class _TokenScores(torch.autograd.Function):
    """Autograd function of ``token_scores``: -log p(label), entropy or None, log p of K ids or None.

    Its backward pass recomputes the logits, which it does not keep.
    """

    @staticmethod
    def forward(
        ctx,
        x_TH,
        weight_VH,
        labels_T,
        first_id: int,
        vocab: Communicator,
        sampled_by: tuple[Tensor | None, Tensor | None, float],
        scored_ids_TK,
        wants_entropy: bool,
        skips_untrained: bool,
    ):
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        loss_T, log_sum_T, entropy_T = (x_TH.new_zeros(len(x_TH), dtype=wide) for _ in range(3))
        scored_TK = None
        if scored_ids_TK is not None:
            scored_TK = x_TH.new_zeros(scored_ids_TK.shape, dtype=wide)
        ctx.sampled_by, ctx.first_id = sampled_by, first_id
        ctx.chunks = _trained_chunks(x_TH, labels_T, skips_untrained)
        for chunk in ctx.chunks:
            trained_T1, target_T1, here_T1 = _targets(labels_T[chunk], weight_VH, first_id)
            logits_TV, left_TV, _ = _sampler_logits(ctx, x_TH, weight_VH, chunk)
            largest_T1 = vocab.all_reduce_max(logits_TV.amax(-1, keepdim=True).to(wide))
            target_logit_T1 = vocab.all_reduce(
                torch.where(here_T1, logits_TV.gather(1, target_T1).to(wide), 0.0)
            )
            weights_TV = (logits_TV - largest_T1).exp_()
            sum_T1 = vocab.all_reduce(weights_TV.sum(-1, keepdim=True))
            log_sum_T1 = sum_T1.log() + largest_T1
            log_sum_T[chunk] = log_sum_T1.squeeze(1)
            loss_T[chunk] = ((log_sum_T1 - target_logit_T1) * trained_T1).squeeze(1)
            if wants_entropy:
                finite_TV = logits_TV if left_TV is None else logits_TV.masked_fill(~left_TV, 0.0)
                mean_T1 = vocab.all_reduce((weights_TV * finite_TV).sum(-1, keepdim=True)) / sum_T1
                entropy_T[chunk] = ((log_sum_T1 - mean_T1) * trained_T1).squeeze(1)
            if scored_TK is not None:
                _, places_TK, here_TK = _targets(scored_ids_TK[chunk], weight_VH, first_id)
                own_TK = logits_TV.gather(1, places_TK.squeeze(1)).to(wide)
                own_TK = vocab.all_reduce(torch.where(here_TK.squeeze(1), own_TK, 0.0))
                scored_TK[chunk] = (own_TK - log_sum_T1) * trained_T1
        saved = x_TH, weight_VH, labels_T, log_sum_T, scored_ids_TK
        ctx.save_for_backward(*saved, entropy_T if wants_entropy else None)
        return loss_T, entropy_T if wants_entropy else None, scored_TK

    @staticmethod
    def backward(ctx, grad_T, grad_entropy_T, grad_scored_TK):
        x_TH, weight_VH, labels_T, log_sum_T, scored_ids_TK, entropy_T = ctx.saved_tensors
        zeros = torch.zeros_like  # chunks leave out tokens that are not trained
        grad_x_TH, grad_weight_VH = _new_gradients(ctx, x_TH, weight_VH, log_sum_T.dtype, zeros)
        temperature_T = ctx.sampled_by[0]
        for chunk in ctx.chunks:
            trained_T1, target_T1, here_T1 = _targets(labels_T[chunk], weight_VH, ctx.first_id)
            logits_TV, left_TV, slope_TV = _sampler_logits(ctx, x_TH, weight_VH, chunk)
            log_probs_TV = logits_TV - log_sum_T[chunk].unsqueeze(1)
            grad_TV = log_probs_TV.exp_() if grad_entropy_T is None else log_probs_TV.exp()
            more_TV = None
            if grad_scored_TK is not None:
                of_ids_TK = grad_scored_TK[chunk] * trained_T1
                _, places_TK, here_TK = _targets(scored_ids_TK[chunk], weight_VH, ctx.first_id)
                more_TV = grad_TV * -of_ids_TK.sum(-1, keepdim=True)
                more_TV.scatter_add_(1, places_TK.squeeze(1), of_ids_TK * here_TK.squeeze(1))
            if grad_entropy_T is not None:
                if left_TV is not None:
                    log_probs_TV = log_probs_TV.masked_fill(~left_TV, 0.0)
                factor_T1 = grad_entropy_T[chunk].unsqueeze(1) * trained_T1
                term_TV = grad_TV * (log_probs_TV + entropy_T[chunk].unsqueeze(1)) * -factor_T1
                more_TV = term_TV if more_TV is None else more_TV + term_TV
            grad_TV.scatter_add_(1, target_T1, -here_T1.to(grad_TV.dtype))
            grad_TV.mul_(grad_T[chunk].unsqueeze(1) * trained_T1)
            if more_TV is not None:
                grad_TV += more_TV
            if temperature_T is not None:
                grad_TV /= temperature_T[chunk].unsqueeze(1)
            if slope_TV is not None:
                grad_TV *= slope_TV
            grad_TV = grad_TV.to(x_TH.dtype)
            _add_gradients(grad_TV, x_TH, weight_VH, grad_x_TH, grad_weight_VH, chunk)
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_x_TH, grad_weight_VH, *(None,) * 7


def _sampler_logits(
    ctx, x_TH: Tensor, weight_VH: Tensor, chunk: slice | Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a chunk's logits divided by the temperature, the allowed ids, and the cap's derivative.

    Logits [T, V] are of the tokens ``chunk``, a range or indices, and this rank's V rows ``weight_VH`` of the head, -inf
    for ids not allowed. Allowed are the ids that top-p or top-k sampling left, bool [T, V]; None: all ids. The derivative
    of the soft cap is [T, V]; None: there is no cap. ``ctx`` (of ``_TokenScores``) holds temperature, allowed ids and cap.
    """
    temperature_T, candidates_TN, soft_cap = ctx.sampled_by
    logits_TV, slope_TV = cap_logits(x_TH[chunk] @ weight_VH.T, soft_cap)
    if temperature_T is not None:
        logits_TV = logits_TV / temperature_T[chunk].unsqueeze(1)
    if candidates_TN is None:
        return logits_TV, None, slope_TV
    ids_TN = candidates_TN[chunk]
    number = weight_VH.shape[0]
    places_TN = ids_TN - ctx.first_id
    places_TN = places_TN.masked_fill(
        (ids_TN < 0) | (places_TN < 0) | (places_TN >= number), number
    )
    left_TV = logits_TV.new_zeros(len(logits_TV), number + 1, dtype=torch.bool)
    left_TV = left_TV.scatter_(1, places_TN, True)[:, :number]
    left_TV |= (ids_TN < 0).all(1, keepdim=True)  # a token without a list keeps all ids
    return logits_TV.masked_fill(~left_TV, -math.inf), left_TV, slope_TV


class TokenScores(NamedTuple):
    """Log-probabilities and entropy of T tokens, in nats, at least float32; 0 for untrained tokens.

    Attributes:
        nll_T: -log p(label), p being the token's probabilities over the vocabulary.
        entropy_T: entropy of p; None: not asked for.
        scored_TK: log p of K further ids; None: no further ids were asked for.
    """

    nll_T: Tensor
    entropy_T: Tensor | None
    scored_TK: Tensor | None


def token_scores(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    first_id: int = 0,
    vocab: Communicator = SINGLE_RANK,
    temperature_T: Tensor | None = None,
    candidates_TN: Tensor | None = None,
    scored_ids_TK: Tensor | None = None,
    wants_entropy: bool = False,
    soft_cap: float = 0.0,
    skips_untrained: bool = False,
) -> TokenScores:
    """Return each token's -log p(label) and entropy, p = softmax(x @ weight.T / temperature).

    The backward recomputes logits, so a step computes four products with the head instead of three.

    Args:
        x_TH: final hidden states.
        weight_VH: vocabulary head, or this rank's rows of it.
        labels_T: int64; ``IGNORE`` marks positions that are not trained.
        first_id: token id of the weight's first row.
        vocab: the ranks that hold the other rows of the head, with the same x and labels.
        temperature_T: temperature of each token; None: 1.
        candidates_TN: ids that sampling left, filled up with -1, over which p is normalised; a token with -1 alone: all.
        scored_ids_TK: further ids whose log-probabilities are wanted; None: none.
        wants_entropy: whether the entropy is computed; else it is None.
        soft_cap: bound of the logits before the temperature divides them (``cap_logits``); 0: none.
        skips_untrained: True to multiply trained tokens alone on a CPU: faster, and sums are rounded otherwise.
    """
    head = x_TH, weight_VH, labels_T, first_id, vocab, (temperature_T, candidates_TN, soft_cap)
    return TokenScores(*_TokenScores.apply(*head, scored_ids_TK, wants_entropy, skips_untrained))


def greedy_tokens(
    x_NH: Tensor,
    weight_VH: Tensor,
    first_id: int = 0,
    vocab: Communicator = SINGLE_RANK,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return the likeliest next token of each of N positions: int64 [N], the same on all ranks.

    Of equally likely tokens the first is returned, and ``NAN_TOKEN`` (-1) where a logit is NaN.

    Args:
        x_NH: final hidden states.
        weight_VH: vocabulary head, or this rank's rows of it, the first of them of token ``first_id``.
        vocab: the ranks that hold the other rows.
        soft_cap: bound of the logits (``cap_logits``); 0: none.
    """
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    logits_NV, _ = cap_logits(x_NH @ weight_VH.T, soft_cap)  # large ones may become equal
    place_N1 = logits_NV.argmax(-1, keepdim=True)
    best_N1 = logits_NV.gather(1, place_N1).to(wide)
    is_nan_N1 = vocab.all_reduce_max(best_N1.isnan().to(wide)) > 0
    best_N1 = best_N1.nan_to_num(nan=math.inf, posinf=math.inf)
    last = torch.iinfo(torch.int64).max
    first_N1 = torch.where(best_N1 == vocab.all_reduce_max(best_N1), place_N1 + first_id, last)
    tokens_N1 = -vocab.all_reduce_max(-first_N1)
    return tokens_N1.masked_fill(is_nan_N1, NAN_TOKEN).squeeze(1)


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss function next to the per-token losses ``nll_BS`` of one micro-batch.

    Attributes:
        labels: [B, S]; ``IGNORE`` marks tokens that are not trained, whose loss is 0.
        doc_ids: [B, S] index of the document within its packed sequence, -1: padding; None: each sequence is one document.
        counts: counts of the whole global batch: ``trained`` tokens, ``documents`` with a trained token.
        context: the ranks that hold the other positions of these sequences.
        given: [B, ...] tensors by name, which the recipe adds to a step's inputs. The head reads ``temperature``
            [B, S], ``candidates`` [B, S, N] (ids left by sampling, to normalise over; filler -1), ``scored_ids`` [B, S, K].
        reported: dict to which ``report`` adds this rank's sums of metrics, by name.
        entropy: [B, S] entropy of predictions if the loss sets ``uses_entropy``, else None.
        scored: [B, S, K] log-probabilities of ``scored_ids``; None: there are no ids.
    """

    labels: Tensor
    doc_ids: Tensor | None
    counts: TokenCounts
    context: Communicator = SINGLE_RANK
    given: Mapping[str, Tensor] = field(default_factory=dict)
    reported: dict[str, Tensor] = field(default_factory=dict)
    entropy: Tensor | None = None
    scored: Tensor | None = None

    def sum_by_document(self, x_BS: Tensor, num_documents: int | None = None) -> Tensor:
        """Sum x over each document, also over the ranks of ``context``: [B, D], differentiable.

        Every rank of ``context`` has the same sums. A loss computed from them is equal on these ranks, so divide it
        by their number (``share``), else it counts once per rank.

        Args:
            num_documents: D, more than every document id; default: the positions of a whole sequence.
        """
        num_documents = num_documents or x_BS.shape[1] * self.context.num_ranks
        doc_ids = torch.zeros_like(self.labels) if self.doc_ids is None else self.doc_ids
        return self.context.sum(sum_within_rows(x_BS, doc_ids, num_documents))

    def share(self, loss: Tensor) -> Tensor:
        """Return ``loss``, a value equal on all ranks of ``context``, divided by the number of these ranks."""
        return loss / self.context.num_ranks

    def report(self, name: str, share: Tensor) -> None:
        """Add this rank's share (its term of a sum over ranks) to the step's metric ``name``.

        The loss function's attribute ``metrics`` must list the name.
        """
        self.reported[name] = self.reported.get(name, 0) + share.detach().to(torch.float64)


# A loss ``(nll_BS, inputs) -> scalar`` returns this rank's share of the step's loss: the sum over ranks and
# micro-batches is the loss. It may have attributes: ``metrics``, the names that it reports; ``uses_entropy``, if it reads
# ``LossInputs.entropy``; ``skips_untrained``, for ``token_scores``; ``mean_over="documents"``, if it is their mean.
Loss = Callable[[Tensor, LossInputs], Tensor]
