"""Load balancing: auxiliary losses that are causal under micro-batching, expert bias, load
counters.

Shapes: B rows, S positions of this rank, E experts, K top-k. Every loss is this rank's share of a
sum over the global batch. Shares are added, never averaged, so no mesh changes the total.
"""

from __future__ import annotations

import torch
from torch import nn

from automoe.moe.process_groups import ProcessGroupCollection
from automoe.moe.recompute import is_recomputing
from automoe.moe.tokens import Tokens


class _AttachLoss(torch.autograd.Function):
    """Identity on an activation that also sends a gradient of one into an auxiliary loss.

    The loss needs no path of its own to the end of the model, so only activations pass from one
    pipeline stage to the next.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss_like = (loss.dtype, loss.device)
        return x.clone()  # not a view: FSDP hooks a unit's outputs, and views lose hooks

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        dtype, device = ctx.loss_like
        return grad, torch.ones((), dtype=dtype, device=device)


def attach_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``x``, with d(total)/d(loss) = 1 added to its backward."""
    return _AttachLoss.apply(x, loss)


def count_choices(
    topk_ids_BSK: torch.Tensor, valid_BS: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """[B, E] float64: how often each expert was chosen in each row."""
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
    """Per-row balance loss (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), rows weighted by their
    tokens.

    E * sum_e f_e P_e with f_e = counts / (K N) and P_e = mean share, N the row's non-padding
    tokens.

    Args:
        shares_BSE: scores normalised to sum one.
        counts_BE: choices on this rank, without padding.

    Returns:
        Scalar: this rank's share of the mean over the global batch, before the coefficient.
    """
    row_counts_BE = pg_collection.sum_over_row(counts_BE).to(shares_BSE.dtype)
    row_tokens_B1 = row_counts_BE.sum(-1, keepdim=True) / top_k
    fractions_BE = row_counts_BE / (row_tokens_B1 * top_k).clamp_min(1)
    # P_e of the row times the row's weight N / num_tokens: the N cancels.
    share_sums_BE = (shares_BSE * tokens.valid.unsqueeze(-1)).sum(1)
    return _balance_loss(fractions_BE, share_sums_BE, tokens)


def lagged_balance_loss(
    shares_BSE: torch.Tensor, fractions_E: torch.Tensor, tokens: Tokens
) -> torch.Tensor:
    """Balance loss over the whole batch with the fractions f of the step before.

    The batch's own fractions are known only after its last micro-batch. Those of the last step are
    known in time and change slowly. Only P is current.
    """
    share_sums_E = (shares_BSE * tokens.valid.unsqueeze(-1)).sum((0, 1))
    return _balance_loss(fractions_E.to(shares_BSE.dtype), share_sums_E, tokens)


def micro_batch_balance_loss(
    shares_BSE: torch.Tensor,
    counts_BE: torch.Tensor,
    tokens: Tokens,
    pg_collection: ProcessGroupCollection,
) -> torch.Tensor:
    """The classical balance loss (arXiv 2101.03961, eq. 4-6), over one micro-batch of all ranks
    that run it.

    Its rows are those that all data-parallel ranks feed their models at the same time. f and P are
    of these rows together, and micro-batches are weighted by their tokens. So it depends on which
    rows meet in a micro-batch, that is on accumulation, and on nothing else of the mesh. Arguments
    as for ``sequence_balance_loss``.
    """
    total_E = pg_collection.sum_over_data(pg_collection.sum_over_row(counts_BE.sum(0))).to(
        shares_BSE.dtype
    )
    fractions_E = total_E / total_E.sum().clamp_min(1)
    share_sums_E = (shares_BSE * tokens.valid.unsqueeze(-1)).sum((0, 1))
    return _balance_loss(fractions_E, share_sums_E, tokens)


def _balance_loss(
    fractions: torch.Tensor, share_sums: torch.Tensor, tokens: Tokens
) -> torch.Tensor:
    """E * sum f P for fractions and sums of shares [E] or [B, E]."""
    return (
        fractions.shape[-1]
        * (fractions * share_sums).sum()
        / tokens.num_tokens.to(share_sums.dtype)
    )


def z_loss(logits_BSE: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Mean squared logsumexp of the logits over the global batch's tokens (arXiv 2202.08906, eq.
    5)."""
    squares_BS = logits_BSE.logsumexp(-1).square() * tokens.valid
    return squares_BS.sum() / tokens.num_tokens.to(squares_BS.dtype)


# A layer's losses in the order in which it counts them, by their names in ``metrics.jsonl``.
LOSSES = ("seq_balance_loss", "global_balance_loss", "micro_batch_balance_loss", "z_loss")


class LoadCounter(nn.Module):
    """What one MoE layer counts over the micro-batches of a step, in float64, zeroed after each
    step.

    Layout: E tokens given to each expert before any is dropped, E tokens that plain top-k of the
    scores would give it, the losses in the order of ``LOSSES``, dropped choices. One vector, for
    one all-reduce a step.
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
        """Numbers that a layer of E experts counts."""
        return 2 * num_experts + len(LOSSES) + 1

    def reset_buffers(self) -> None:
        self.totals.zero_()

    @torch.no_grad()
    def add(
        self,
        chosen_BE: torch.Tensor,
        plain_BE: torch.Tensor,
        losses: list[torch.Tensor],
        dropped_BSK: torch.Tensor | None = None,
    ) -> None:
        """Counts of one micro-batch, its losses, one for each of ``LOSSES``, and which choices were
        dropped, if any."""
        if is_recomputing():
            return  # counted in the forward pass
        self.totals[:-1] += torch.cat(
            (chosen_BE.sum(0), plain_BE.sum(0), torch.stack(losses).to(torch.float64))
        )
        if dropped_BSK is not None:
            self.totals[-1] += dropped_BSK.sum()


@torch.no_grad()
def update_expert_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, rate: float) -> None:
    """b += rate * sign(mean - count), in place (arXiv 2408.15664, algorithm 1).

    Args:
        bias_E: float32.
        counts_E: tokens of the global batch given to each expert.
        rate: step of the bias.
    """
    bias_E += rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)
