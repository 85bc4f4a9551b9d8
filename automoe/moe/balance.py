"""Load balancing: auxiliary losses, updates of the expert bias, and load counters.

No loss needs the routing of a later micro-batch. Every loss is this rank's share of a sum over the
global batch. Shares are added, never averaged, so the mesh does not change the total. Shapes: B
rows, S positions of this rank, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import nn

from automoe.comm.process_groups import ProcessGroupCollection
from automoe.comm.tokens import Tokens
from automoe.moe.recompute import counts


class _AttachLoss(torch.autograd.Function):
    """Identity on an activation whose backward pass also sends a gradient of one into a loss.

    The auxiliary loss needs no path of its own to the end of the model, so only activations pass
    from one pipeline stage to the next.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss_like = (loss.dtype, loss.device)
        return x.clone()  # a view would lose the hooks that FSDP sets on outputs

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        dtype, device = ctx.loss_like
        return grad, torch.ones((), dtype=dtype, device=device)


def attach_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return ``x``, whose backward pass also runs that of ``loss``, with gradient 1."""
    return _AttachLoss.apply(x, loss)


def count_choices(
    topk_ids_BSK: torch.Tensor, valid_BS: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Return how often each row chose each expert, without padding: [B, E] float64."""
    ones_BSK = valid_BS.unsqueeze(-1).expand_as(topk_ids_BSK).to(torch.float64)
    counts_BE = ones_BSK.new_zeros(topk_ids_BSK.shape[0], num_experts)
    return counts_BE.scatter_add_(1, topk_ids_BSK.flatten(1), ones_BSK.flatten(1))


def sequence_balance_loss(
    shares_BSE: torch.Tensor,
    counts_BE: torch.Tensor,
    tokens: Tokens,
    pg_collection: ProcessGroupCollection,
    top_k: int,
) -> torch.Tensor:
    """Return the per-row balance loss, rows weighted by their tokens.

    The formula is E * sum_e f_e P_e (DeepSeek-V3, arXiv 2412.19437, eq. 17-20). f_e is counts /
    (K N), P_e is the mean share of expert e, N is the number of non-padding tokens in the row.

    Args:
        shares_BSE: scores normalised to sum to one.
        counts_BE: choices on this rank, without padding.
        tokens: the micro-batch's per-token tensors.
        pg_collection: process groups of the ranks that share rows.
        top_k: experts per token.

    Returns:
        Scalar: this rank's share of the mean over the global batch, before the coefficient.
    """
    row_counts_BE = pg_collection.sum_over_row(counts_BE).to(shares_BSE.dtype)
    row_tokens_B1 = row_counts_BE.sum(-1, keepdim=True) / top_k
    fractions_BE = row_counts_BE / (row_tokens_B1 * top_k).clamp_min(1)
    # P_e divides by N and the row's weight is N / num_tokens, so N cancels.
    return _balance_loss(fractions_BE, shares_BSE, tokens)


def lagged_balance_loss(
    shares_BSE: torch.Tensor, fractions_E: torch.Tensor, tokens: Tokens
) -> torch.Tensor:
    """Return the balance loss over the whole batch, with the fractions f of the previous step.

    The fractions of the current batch are known only after its last micro-batch. Those of the
    previous step are known in time and change slowly. Only the mean shares P are current.

    Args:
        shares_BSE: scores normalised to sum to one.
        fractions_E: fraction of the previous step's choices that each expert received.
        tokens: the micro-batch's per-token tensors.

    Returns:
        Scalar: this rank's share of the mean over the global batch, before the coefficient.
    """
    return _balance_loss(fractions_E.to(shares_BSE.dtype), shares_BSE, tokens)


def micro_batch_balance_loss(
    shares_BSE: torch.Tensor,
    counts_BE: torch.Tensor,
    tokens: Tokens,
    pg_collection: ProcessGroupCollection,
) -> torch.Tensor:
    """Return the classical balance loss (arXiv 2101.03961, eq. 4-6) over one micro-batch.

    The micro-batch consists of the rows that all data-parallel ranks process at the same time. f
    and P are computed over these rows together, and micro-batches are weighted by their tokens. The
    loss therefore depends on gradient accumulation (which rows share a micro-batch), and on nothing
    else of the mesh. Arguments and result are those of ``sequence_balance_loss``.
    """
    total_E = pg_collection.sum_over_data(pg_collection.sum_over_row(counts_BE.sum(0))).to(
        shares_BSE.dtype
    )
    fractions_E = total_E / total_E.sum().clamp_min(1)
    return _balance_loss(fractions_E, shares_BSE, tokens)


def _balance_loss(
    fractions: torch.Tensor, shares_BSE: torch.Tensor, tokens: Tokens
) -> torch.Tensor:
    """Return E * sum f P over the batch's tokens, for fractions of the batch [E] or its rows [B, E]."""
    sums = (shares_BSE * tokens.valid.unsqueeze(-1)).sum(1 if fractions.dim() == 2 else (0, 1))
    total = (fractions * sums).sum()
    return fractions.shape[-1] * total / tokens.num_tokens.to(sums.dtype)


def z_loss(logits_BSE: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return this rank's share of the router z-loss (arXiv 2202.08906, eq. 5), a scalar.

    The loss is the mean squared logsumexp of the logits over the global batch's tokens.
    """
    squares_BS = logits_BSE.logsumexp(-1).square() * tokens.valid
    return squares_BS.sum() / tokens.num_tokens.to(squares_BS.dtype)


# These are a layer's losses in the order of its counters, with their names in ``metrics.jsonl``.
LOSSES = ("seq_balance_loss", "global_balance_loss", "micro_batch_balance_loss", "z_loss")


class LoadCounter(nn.Module):
    """Counters of one MoE layer over the micro-batches of a step, zeroed after each step.

    One float64 vector holds all counters, so that a step needs one all-reduce. Its layout: E counts
    of tokens given to each expert before any are dropped, E counts of tokens that plain top-k of
    the scores would give to it, the losses in the order of ``LOSSES``, and the numbers of dropped
    choices, of repeated choices of an engine, and of those that the router would not make.
    """

    totals: torch.Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        size = self.size(num_experts)
        self.register_buffer("totals", torch.empty(size, dtype=torch.float64), persistent=False)
        self.reset_buffers()

    @staticmethod
    def size(num_experts: int) -> int:
        """Return the length of the vector for a layer of E experts."""
        return 2 * num_experts + len(LOSSES) + 3

    def reset_buffers(self) -> None:
        self.totals.zero_()

    @torch.no_grad()
    def add(
        self,
        chosen_BE: torch.Tensor,
        plain_BE: torch.Tensor,
        losses: list[torch.Tensor],
        dropped_BSK: torch.Tensor | None = None,
        replayed: torch.Tensor | None = None,
    ) -> None:
        """Add one micro-batch to the counters, if the pass counts.

        Args:
            chosen_BE: tokens given to each expert.
            plain_BE: tokens that plain top-k of the scores would give to each expert.
            losses: one scalar for each of ``LOSSES``.
            dropped_BSK: bool, the choices that were dropped; None if the layer drops none.
            replayed: [2] repeated choices of an engine, and those that the router lacks.
        """
        if not counts():
            return
        self.totals[:-3] += torch.cat(
            (chosen_BE.sum(0), plain_BE.sum(0), torch.stack(losses).to(torch.float64))
        )
        if dropped_BSK is not None:
            self.totals[-3] += dropped_BSK.sum()
        if replayed is not None:
            self.totals[-2:] += replayed


@torch.no_grad()
def update_expert_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, rate: float) -> None:
    """Update the expert bias in place: b += rate * sign(mean - count) (arXiv 2408.15664, alg. 1).

    Args:
        bias_E: float32 bias.
        counts_E: tokens of the global batch given to each expert.
        rate: step size of the bias.
    """
    bias_E += rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)
