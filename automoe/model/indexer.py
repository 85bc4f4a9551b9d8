"""The lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): it chooses a query's keys.

Query t scores key u by I_tu = sum over heads j of w_tj relu(q_tj . k_u), and attends to the keys
with the K largest scores. The indexer learns from attention alone: its inputs are detached, and its
loss is the KL divergence of softmax(I_t) from attention's probabilities, summed over heads and
normalised (equations 3 and 4). All other parameters get no gradient from it.

Letters of dimensions: ``automoe.model``; here J heads of the indexer, D their width, L latent of
queries, c queries of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automoe.config.schema import ModelConfig
from automoe.model.backend import BackendConfig
from automoe.model.linear import Linear
from automoe.model.rows import gather_row
from automoe.passes.recompute import is_counted

if TYPE_CHECKING:
    from automoe.model.attention import AttentionSetup

CHUNK = 128  # queries whose scores by every head are in memory at once


class IndexInputs(NamedTuple):
    """Inputs of an indexer's scores: queries q [B, s, J, D], keys k [B, R, D], head weights w [B, s, J].

    s: this tp rank's positions, R: whole sequence, J: index heads. Queries are scaled by 1/sqrt(D)
    and weights by 1/sqrt(J).
    """

    q: Tensor
    k: Tensor
    w: Tensor


class LayerNorm(nn.LayerNorm):
    """LayerNorm with a bias; torch computes it in at least float32."""

    first_values = {"weight": "ones"}


class Indexer(nn.Module):
    """Indexer of one layer (DeepSeek sparse attention): chooses the top-k keys of each query.

    Parameters have the names of HuggingFace files.

    Attributes:
        loss_sum: this rank's share of the indexer's mean loss per token, summed over the
            micro-batches of a step.
    """

    loss_sum: Tensor

    def __init__(self, config: ModelConfig, backend: BackendConfig) -> None:
        super().__init__()
        attention = config.attention
        assert attention.q_lora_rank is not None, "refused by the rules"
        self.ranks = backend.pg_collection.tp
        self.dim = attention.index_head_dim
        self.topk = attention.index_topk
        self.interleaved = attention.index_interleaved
        self.warmup = backend.indexer_warmup
        self.wq_b = Linear(attention.q_lora_rank, attention.index_n_heads * self.dim)
        self.wk = Linear(config.hidden_size, self.dim)
        self.k_norm = LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = Linear(config.hidden_size, attention.index_n_heads)
        self.register_buffer("loss_sum", torch.empty((), dtype=torch.float64), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.loss_sum.zero_()

    def forward(self, x_BsH: Tensor, latent_BsL: Tensor, setup: AttentionSetup) -> IndexInputs:
        """Return the inputs of the index scores in at least float32; arguments get no gradient.

        Args:
            x_BsH: hidden states at this tp rank's positions.
            latent_BsL: latents of the queries at the same positions.
            setup: rotation angles, and the ranks from which keys are gathered.
        """
        x_BsH, latent_BsL = x_BsH.detach(), latent_BsL.detach()
        cos, sin = (self.ranks.local_shard(angle) for angle in (setup.cos, setup.sin))
        q_BsJD = self.wq_b(latent_BsL).unflatten(-1, (-1, self.dim))
        k_Bs1D = self.k_norm(self.wk(x_BsH)).unsqueeze(2)
        q_BsJD, k_Bs1D = (
            setup.rope.rotate(x, cos, sin, self.interleaved, 0) for x in (q_BsJD, k_Bs1D)
        )
        k_BRD = gather_row(self.ranks.all_gather(k_Bs1D.squeeze(2)), setup.key_gather)
        wide = torch.promote_types(x_BsH.dtype, torch.float32)
        q_BsJD, k_BRD, w_BsJ = (x.to(wide) for x in (q_BsJD, k_BRD, self.weights_proj(x_BsH)))
        return IndexInputs(q_BsJD * self.dim**-0.5, k_BRD, w_BsJ * w_BsJ.shape[-1] ** -0.5)

    @torch.no_grad()
    def choose(self, inputs: IndexInputs, setup: AttentionSetup) -> Tensor:
        """Return [B, S, R], True where a query attends to a key: its top-k of those it may see.

        ``inputs`` is the result of ``forward``, ``setup.seen`` says which keys a query may see. In
        the indexer's warm-up a query attends to all of these. Ties between keys are broken as
        ``torch.topk`` breaks them in whole sequences, whatever part of the queries this rank has.
        """
        if self.warmup:
            return setup.seen
        seen_BsR = self.ranks.local_shard(setup.seen)
        chosen_BsR = torch.zeros_like(seen_BsR)
        for q, w, seen, chosen in _chunks(inputs.q, inputs.w, seen_BsR, chosen_BsR):
            scores = index_scores(q, inputs.k, w)[0].masked_fill(~seen, -torch.inf)
            top = scores.topk(min(self.topk, scores.shape[-1])).indices
            # A query that sees fewer than k keys has chosen unseen ones as well: drop these.
            chosen.scatter_(-1, top, True).logical_and_(seen)
        return self.ranks.all_gather(chosen_BsR)

    def loss(
        self,
        inputs: IndexInputs,
        chosen_BSR: Tensor,
        q_BSND: Tensor,
        k_BRND: Tensor,
        scale: float,
        setup: AttentionSetup,
    ) -> Tensor | None:
        """Return this rank's term of the indexer's loss, a scalar; None if no gradient is needed.

        The loss is KL(attention || indexer) over the chosen keys, as a mean over the tokens of the
        global batch: attention's probabilities, averaged over heads, and the softmax of the indexer's
        scores. In a training pass the term is added to the buffer ``loss_sum``.

        Args:
            inputs: result of ``forward``: queries, keys and head weights of the indexer.
            chosen_BSR: True where a query attends to a key.
            q_BSND, k_BRND, scale: inputs of attention's scores, for this rank's heads.
            setup: ``setup.tokens`` says which tokens are padding and how many the global batch has.
        """
        learns = torch.is_grad_enabled() and self.training
        if not (learns and any(x.requires_grad for x in inputs)):
            return None
        shares_BSR = attention_shares(q_BSND, k_BRND, chosen_BSR, scale)
        target_BsR = self.ranks.reduce_scatter(shares_BSR)
        target_BsR = target_BsR / target_BsR.sum(-1, keepdim=True)
        tokens = setup.tokens
        weight_Bs = self.ranks.local_shard(tokens.valid).to(target_BsR.dtype) / tokens.num_tokens
        chosen_BsR = self.ranks.local_shard(chosen_BSR)
        loss = _Divergence.apply(*inputs, target_BsR, chosen_BsR, weight_Bs)
        if is_counted():
            self.loss_sum += loss.detach()
        return loss


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(CHUNK, dim=1) for x in tensors), strict=True)


def index_scores(q_BcJD: Tensor, k_BRD: Tensor, w_BcJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index scores (DeepSeek-V3.2, eq. 1) of c queries for R keys, summed and by head.

    Args:
        q_BcJD, k_BRD: queries of J index heads of width D, and the keys that the heads share.
        w_BcJ: weight of each head.

    Returns:
        [B, c, R] weighted sums over heads, and [B, c, J, R], relu(q . k) of each head.
    """
    # One product for all queries of a row; a product per query would copy the keys each time.
    by_head_BcJR = F.relu(q_BcJD.flatten(1, 2) @ k_BRD.mT).unflatten(1, q_BcJD.shape[1:3])
    return (w_BcJ.unsqueeze(-2) @ by_head_BcJR).squeeze(-2), by_head_BcJR


@torch.no_grad()
def attention_shares(q_BSND: Tensor, k_BRND: Tensor, mask_BSR: Tensor, scale: float) -> Tensor:
    """Return attention's probabilities summed over heads: [B, S, R] in at least float32.

    Args:
        mask_BSR: True where a query attends to a key.
        scale: factor of the products of queries and keys.
    """
    wide = torch.promote_types(q_BSND.dtype, torch.float32)
    k_BNRD = k_BRND.transpose(1, 2)
    if len(k_BNRD) > 1:  # else the product of each chunk would copy the keys
        k_BNRD = k_BNRD.contiguous()
    shares = []
    for q, mask in _chunks(q_BSND, mask_BSR):
        logits_BNcR = (q.transpose(1, 2) @ k_BNRD.mT).to(wide) * scale
        shares.append(logits_BNcR.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1).sum(1))
    return torch.cat(shares, dim=1)


class _Divergence(torch.autograd.Function):
    """Autograd function: weighted sum over queries of KL(target || softmax of chosen keys' scores).

    Its inputs are q, k and w (``IndexInputs``); the target [B, s, R], attention's probabilities;
    the chosen keys [B, s, R] bool; and the weights [B, s], 1 / number of tokens of the global
    batch, 0 for padding. The result is a scalar.

    Gradients are made in the forward pass, one chunk of queries after the other: scores of every
    head would take J numbers for each query and key. The gradient of a query's divergence by its
    scores is softmax - target.
    """

    @staticmethod
    def forward(ctx, q_BsJD, k_BRD, w_BsJ, target_BsR, chosen_BsR, weight_Bs):
        total = weight_Bs.new_zeros(())
        grads_q, grads_w = [], []
        grad_k = torch.zeros_like(k_BRD)
        for q, w, target, chosen, weight in _chunks(
            q_BsJD, w_BsJ, target_BsR, chosen_BsR, weight_Bs
        ):
            scores, by_head = index_scores(q, k_BRD, w)
            log_shares = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
            divergence = F.kl_div(log_shares.masked_fill(~chosen, 0.0), target, reduction="none")
            total += (divergence.sum(-1) * weight).sum()
            grad_BcR = (log_shares.exp() - target) * weight.unsqueeze(-1)
            grads_w.append((by_head @ grad_BcR.unsqueeze(-1)).squeeze(-1))
            grad_BIR = (w.unsqueeze(-1) * grad_BcR.unsqueeze(-2) * (by_head > 0)).flatten(1, 2)
            grads_q.append((grad_BIR @ k_BRD).view_as(q))
            grad_k += grad_BIR.mT @ q.flatten(1, 2)
        ctx.save_for_backward(torch.cat(grads_q, 1), grad_k, torch.cat(grads_w, 1))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *(grad * saved for saved in ctx.saved_tensors), None, None, None
