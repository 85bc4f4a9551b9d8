"""Load balancing: auxiliary losses, updates of the expert bias, and load counters.

No loss needs the routing of a later micro-batch. Every loss is this rank's share of a sum over the
global batch. Shares are added, never averaged, so the mesh does not change the total. Letters
of dimensions: ``automoe.model``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from automoe.comm.tokens import Tokens
from automoe.passes.recompute import is_counted


class _AttachLoss(torch.autograd.Function):
    """Autograd function of an activation and a scalar loss: returns a copy of the activation.

    The backward pass also sends a gradient of one into the loss. So an auxiliary loss needs no path of
    its own to the end of the model, and only activations pass from one pipeline stage to the next.
    """

    @staticmethod
    def forward(ctx, x, loss):
        ctx.loss_like = (loss.dtype, loss.device)
        return x.clone()  # a view would lose the hooks that FSDP sets on outputs

    @staticmethod
    def backward(ctx, grad):
        dtype, device = ctx.loss_like
        return grad, torch.ones((), dtype=dtype, device=device)


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return ``x``; its backward pass also runs the backward of ``loss``, with gradient 1."""
    return _AttachLoss.apply(x, loss)


def choices_by_sequence(topk_ids_BsK: Tensor, valid_Bs: Tensor, num_experts: int) -> Tensor:
    """Return how often the tokens of each sequence chose each expert: [B, E] float64.

    ``topk_ids_BsK`` are the chosen experts' ids, at this rank's s positions. Padding, where
    ``valid_Bs`` is False, does not count.
    """
    ones_BsK = valid_Bs.unsqueeze(-1).expand_as(topk_ids_BsK).to(torch.float64)
    counts_BE = ones_BsK.new_zeros(topk_ids_BsK.shape[0], num_experts)
    return counts_BE.scatter_add_(1, topk_ids_BsK.flatten(1), ones_BsK.flatten(1))


def load_fractions(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fraction of choices that each expert received, [..., E] in ``dtype``.

    ``counts`` [..., E] are numbers of choices; if all are zero, so are the fractions.
    """
    counts = counts.to(dtype)
    return counts / counts.sum(-1, keepdim=True).clamp_min(1)


def balance_loss(fractions: Tensor, shares_BsE: Tensor, tokens: Tokens) -> Tensor:
    """Return this rank's share of the mean balance loss E * sum over experts of f P, a scalar.

    f is the fraction of choices that an expert received, P its mean share of scores. Three losses
    take f over different tokens:

        sequence     f and P of each sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20). The mean
                     over sequences is weighted by their numbers of tokens. This cancels the
                     division in P's mean, so scores are summed over tokens and not averaged.
        global       f of the previous step's batch, since f of a batch is known only after its last
                     micro-batch; f changes slowly.
        micro-batch  f of the sequences that all data-parallel ranks process at the same time (arXiv
                     2101.03961, eq. 4-6). Mesh and gradient accumulation change this loss only by
                     which sequences share a micro-batch.

    Args:
        fractions: f, of the batch [E] or of each sequence [B, E].
        shares_BsE: scores normalised to sum to one.
        tokens: the micro-batch's per-token tensors.

    Returns:
        A scalar, to be multiplied by the loss's coefficient.
    """
    sums = (shares_BsE * tokens.valid.unsqueeze(-1)).sum(1 if fractions.dim() == 2 else (0, 1))
    total = (fractions * sums).sum()
    return fractions.shape[-1] * total / tokens.num_tokens.to(sums.dtype)


def z_loss(logits_BsE: Tensor, tokens: Tokens) -> Tensor:
    """Return this rank's share of the router z-loss (arXiv 2202.08906, eq. 5), a scalar.

    The loss is the mean squared logsumexp of the logits over the global batch's tokens.
    """
    squares_Bs = logits_BsE.logsumexp(-1).square() * tokens.valid
    return squares_Bs.sum() / tokens.num_tokens.to(squares_Bs.dtype)


# These are a layer's losses in the order of its counters, with their names in ``metrics.jsonl``.
LOSSES = ("seq_balance_loss", "global_balance_loss", "micro_batch_balance_loss", "z_loss")


class Loads(NamedTuple):
    """Counters of one MoE layer over a step, as views; for L layers together each has a first dim L.

    Attributes:
        experts: [2, E] number of tokens given to each expert before any are dropped, and number
            that plain top-k of the scores would give to it.
        losses: [4] sequence, global and micro-batch balance loss, and z-loss (``LOSSES``).
        dropped: [] number of dropped choices.
        replayed: [2] number of choices repeated from an inference engine, and of those among them
            that the router would not make.
    """

    experts: Tensor
    losses: Tensor
    dropped: Tensor
    replayed: Tensor


class LoadCounter(nn.Module):
    """Counters of one MoE layer over the micro-batches of a step, zeroed after each step.

    One float64 vector, ``totals``, holds all counters, so that a step needs one all-reduce;
    ``views`` splits it into tokens of each of ``num_experts`` experts, losses, and dropped and
    repeated choices.
    """

    totals: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        totals = torch.empty(self.size(num_experts), dtype=torch.float64)
        self.register_buffer("totals", totals, persistent=False)
        self.reset_buffers()

    @staticmethod
    def size(num_experts: int) -> int:
        """Return the length of ``totals``, 2 E + 7, for a layer of E = ``num_experts`` experts.

        It holds two counters per expert, four losses, dropped choices, and two for repeated ones.
        """
        return 2 * num_experts + len(LOSSES) + 3

    @staticmethod
    def views(totals: Tensor) -> Loads:
        """Split ``totals`` by kind of counter into the views of ``Loads``, such as tokens per expert.

        ``totals`` is one layer's vector [n], or [L, n] of L layers.
        """
        num_counts = totals.shape[-1] - len(LOSSES) - 3
        experts, losses, dropped, replayed = totals.split((num_counts, len(LOSSES), 1, 2), dim=-1)
        return Loads(experts.unflatten(-1, (2, -1)), losses, dropped.squeeze(-1), replayed)

    def reset_buffers(self) -> None:
        self.totals.zero_()

    @torch.no_grad()
    def add(
        self,
        chosen_BE: Tensor,
        plain_BE: Tensor,
        losses: list[Tensor],
        dropped_BsK: Tensor | None = None,
        replayed: Tensor | None = None,
    ) -> None:
        """Add one micro-batch to the counters, if it is a training pass and not a recomputation.

        Args:
            chosen_BE: tokens of each sequence given to each expert, before any are dropped.
            plain_BE: numbers that plain top-k of the scores would give.
            losses: sequence, global and micro-batch balance loss, and z-loss: scalars.
            dropped_BsK: bool, the choices that were dropped; None if the layer drops none.
            replayed: [2] choices repeated from an inference engine, and how many of them the router
                would not make; None: there are none.
        """
        if not is_counted():
            return
        loads = self.views(self.totals)
        loads.experts.add_(torch.stack((chosen_BE.sum(0), plain_BE.sum(0))))
        loads.losses.add_(torch.stack(losses))
        if dropped_BsK is not None:
            loads.dropped.add_(dropped_BsK.sum())
        if replayed is not None:
            loads.replayed.add_(replayed)


@torch.no_grad()
def update_expert_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Update the expert bias in place: b += rate * sign(mean - count) (arXiv 2408.15664, alg. 1).

    Args:
        bias_E: float32 bias; of the first experts alone, if the others' stay (arXiv 2509.01322).
        counts_E: number of tokens of the global batch given to each expert; the mean is over all.
        rate: amount that is added to or subtracted from each bias.
    """
    bias_E += rate * torch.sign(counts_E.mean() - counts_E[: len(bias_E)]).to(bias_E.dtype)
