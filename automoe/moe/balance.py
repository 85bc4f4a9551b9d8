"""Load balancing: auxiliary losses that are causal under micro-batching, expert bias, load counters.

Shapes: B rows, S positions of this rank, E experts, K top-k. Every loss here is this rank's share of
a sum over the global batch, so shares are added, never averaged, and no mesh changes the total.
"""

from __future__ import annotations

import torch
from torch import nn

from automoe.moe.communicators import Communicators
from automoe.moe.decisions import recomputing
from automoe.moe.tokens import Tokens


class _AttachLoss(torch.autograd.Function):
    """Identity on an activation that also sends a gradient of one into an auxiliary loss.

    The loss then needs no path of its own to the end of the model, so a pipeline border carries
    activations alone.
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


def count_choices(ids: torch.Tensor, valid: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How often each expert was chosen in each row: ids [B, S, K], valid [B, S] -> [B, E] float64."""
    ones = valid.unsqueeze(-1).expand_as(ids).to(torch.float64)
    counts = torch.zeros(ids.shape[0], num_experts, dtype=torch.float64, device=ids.device)
    return counts.scatter_add_(1, ids.flatten(1), ones.flatten(1))


def sequence_balance_loss(
    shares: torch.Tensor, counts: torch.Tensor, tokens: Tokens, comms: Communicators, top_k: int
) -> torch.Tensor:
    """Per-row balance loss (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), rows weighted by their tokens.

    E * sum_e f_e P_e with f_e = counts / (K N) and P_e = mean share, N the row's non-padding tokens.

    Args:
        shares: [B, S, E] scores normalised to sum one.
        counts: [B, E] choices on this rank, padding left out.
        top_k: K.

    Returns:
        Scalar: this rank's share of the mean over the global batch (times no coefficient).
    """
    valid = tokens.valid.unsqueeze(-1)
    row_counts = comms.sum_over_row(counts).to(shares.dtype)
    row_tokens = row_counts.sum(-1, keepdim=True) / top_k
    fractions = row_counts / (row_tokens * top_k).clamp_min(1)
    # P_e of the row times the row's weight N / num_tokens: the N cancels.
    share_sums = (shares * valid).sum(1)
    return shares.shape[-1] * (fractions * share_sums).sum() / tokens.num_tokens.to(shares.dtype)


def lagged_balance_loss(shares: torch.Tensor, fractions: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Balance loss over the whole batch with the fractions f [E] of the step before.

    The batch's own fractions are known only after its last micro-batch; last step's are known in time
    and change slowly. Only P is current.
    """
    share_sums = (shares * tokens.valid.unsqueeze(-1)).sum((0, 1))
    return shares.shape[-1] * (fractions.to(shares.dtype) * share_sums).sum() / tokens.num_tokens.to(shares.dtype)


def micro_batch_balance_loss(
    shares: torch.Tensor, counts: torch.Tensor, tokens: Tokens, comms: Communicators
) -> torch.Tensor:
    """The classical balance loss (arXiv 2101.03961, eq. 4-6), over one micro-batch of all ranks that run it.

    Its rows are those that every data-parallel rank feeds its model at the same time. f and P are of these
    rows together, and micro-batches are weighted by their tokens. So it depends on which rows meet in a
    micro-batch, that is on accumulation, and on nothing else of the mesh.

    Args:
        shares: [B, S, E]; counts: [B, E], as for ``sequence_balance_loss``.
    """
    total = comms.sum_over_data(comms.sum_over_row(counts.sum(0))).to(shares.dtype)
    fractions = total / total.sum().clamp_min(1)
    share_sums = (shares * tokens.valid.unsqueeze(-1)).sum((0, 1))
    return shares.shape[-1] * (fractions * share_sums).sum() / tokens.num_tokens.to(shares.dtype)


def z_loss(logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Mean squared logsumexp of the logits [B, S, E] over the global batch's tokens (arXiv 2202.08906, eq. 5)."""
    squares = logits.logsumexp(-1).square() * tokens.valid
    return squares.sum() / tokens.num_tokens.to(squares.dtype)


LOSSES = ("sequence", "lagged", "micro_batch", "z")  # the order in which a layer counts its losses


class LoadCounter(nn.Module):
    """What one MoE layer counts over the micro-batches of a step, in float64, zeroed after each step.

    Layout: E tokens given to each expert before any is dropped, E tokens that plain top-k of the scores
    would give it, the losses in the order of ``LOSSES``, dropped choices. One vector, so that one all-reduce
    serves a step.
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
    def add(self, chosen: torch.Tensor, plain: torch.Tensor, losses: list[torch.Tensor]) -> None:
        """chosen and plain: [B, E] counts of one micro-batch; losses: one for each of ``LOSSES``."""
        if recomputing():
            return  # counted in the first pass
        step = torch.cat((chosen.sum(0), plain.sum(0), torch.stack(losses).to(torch.float64)))
        self.totals[:-1] += step

    @torch.no_grad()
    def add_dropped(self, kept: torch.Tensor, valid: torch.Tensor) -> None:
        """kept: [B, S, K] choices that fit; valid: [B, S] tokens that are not padding."""
        if recomputing():
            return  # as above
        self.totals[-1] += (valid.unsqueeze(-1) & ~kept).sum()


@torch.no_grad()
def update_expert_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> None:
    """b += rate * sign(mean - count), in place (arXiv 2408.15664, algorithm 1).

    Args:
        bias: [E] float32.
        counts: [E] tokens of the global batch given to each expert.
        rate: step of the bias.
    """
    bias += rate * torch.sign(counts.mean() - counts).to(bias.dtype)
