"""The lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): it chooses a query's keys.

Query t scores key u by I_tu = sum over heads j of w_tj relu(q_tj . k_u), and attends to the keys
with the K largest scores. The indexer learns from attention alone: its inputs are detached, and its
loss is the KL divergence of softmax(I_t) from attention's probabilities, summed over heads and
normalised (equations 3 and 4). All other parameters get no gradient from it.

Letters of dimensions: ``automoe.model``; here J heads of the indexer, D their width, L latent of
queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from automoe.config.schema import ModelConfig
from automoe.kernels.index_scores import Divergence, attention_shares, in_chunks, index_scores
from automoe.model.backend import BackendConfig
from automoe.model.linear import Linear
from automoe.model.rows import gather_row
from automoe.passes.recompute import is_counted

if TYPE_CHECKING:
    from automoe.model.attention import AttentionSetup


class IndexInputs(NamedTuple):
    """Inputs of an indexer's scores: queries q [B, s, J, D], keys k [B, R, D], head weights w [B, s, J].

    s: this tp rank's positions, R: whole sequence, J: index heads. Queries are scaled by 1/sqrt(D)
    and weights by 1/sqrt(J).
    """

    q: Tensor
    k: Tensor
    w: Tensor


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` that names its initial values; torch computes it in at least float32."""

    first_values = {"weight": "ones"}


class KeyChooser(nn.Module, ABC):
    """Base class of indexers, which choose the top-k keys of each query by scores of their own.

    Args:
        base: arguments for the constructor of a subclass's other base class, if it has one.

    Attributes:
        loss_sum: this rank's share of the indexer's mean loss per token, summed over the
            micro-batches of a step.
    """

    loss_sum: Tensor

    def __init__(self, config: ModelConfig, backend: BackendConfig, *base: object) -> None:
        super().__init__(*base)
        attention = config.attention
        assert attention.q_lora_rank is not None, "refused by the rules"
        self.ranks = backend.pg_collection.tp
        self.dim = attention.index_head_dim
        self.topk = attention.index_topk
        self.warmup = backend.indexer_warmup
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
        x_BsH = x_BsH.detach()
        q_BsJD, k_BRD = self.project(x_BsH, latent_BsL.detach(), setup)
        wide = torch.promote_types(x_BsH.dtype, torch.float32)
        q_BsJD, k_BRD, w_BsJ = (x.to(wide) for x in (q_BsJD, k_BRD, self.weights_proj(x_BsH)))
        return IndexInputs(q_BsJD * self.dim**-0.5, k_BRD, w_BsJ * w_BsJ.shape[-1] ** -0.5)

    @abstractmethod
    def project(
        self, x_BsH: Tensor, latent_BsL: Tensor, setup: AttentionSetup
    ) -> tuple[Tensor, Tensor]:
        """Return the indexer's queries [B, s, J, D] and its keys [B, R, D], which J heads share, both rotated.

        Args:
            x_BsH: hidden states at this tp rank's s positions.
            latent_BsL: latents of the queries at these positions.
            setup: rotation angles, and the ranks from which the R keys are gathered.
        """

    @torch.no_grad()
    def choose(self, inputs: IndexInputs, seen_BSR: Tensor) -> Tensor:
        """Return [B, S, R], True where a query attends to a key: for the top-k of the keys that it may see.

        ``inputs`` is the result of ``forward``, ``seen_BSR`` says which keys a query may see. In
        the indexer's warm-up a query attends to all keys that it may see. Ties between keys are
        broken as ``torch.topk`` breaks them in whole sequences, whatever part of the queries this
        rank has.
        """
        if self.warmup:
            return seen_BSR
        seen_BsR = self.ranks.local_shard(seen_BSR)
        chosen_BsR = torch.zeros_like(seen_BsR)
        for q, w, seen, chosen in in_chunks(inputs.q, inputs.w, seen_BsR, chosen_BsR):
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
        scores. A query without a key counts as zero. In a training pass the term is added to the
        buffer ``loss_sum``.

        Args:
            inputs: result of ``forward``: queries, keys and head weights of the indexer.
            chosen_BSR: True where a query attends to a key.
            q_BSND, k_BRND, scale: inputs of attention's scores, for this rank's heads.
            setup: ``setup.tokens`` says which tokens are padding and how many the global batch has.
        """
        learns = torch.is_grad_enabled() and self.training
        if not (learns and any(x.requires_grad for x in inputs)):
            return None
        some_BS = chosen_BSR.any(-1)
        chosen_BSR = chosen_BSR | ~some_BS.unsqueeze(-1)  # finite shares, which have no weight
        shares_BSR = attention_shares(q_BSND, k_BRND, chosen_BSR, scale)
        target_BsR = self.ranks.reduce_scatter(shares_BSR)
        target_BsR = target_BsR / target_BsR.sum(-1, keepdim=True)
        tokens = setup.tokens
        weighs_Bs = self.ranks.local_shard(tokens.valid & some_BS)
        weight_Bs = weighs_Bs.to(target_BsR.dtype) / tokens.num_tokens
        chosen_BsR = self.ranks.local_shard(chosen_BSR)
        loss = Divergence.apply(*inputs, target_BsR, chosen_BsR, weight_Bs)
        if is_counted():
            self.loss_sum += loss.detach()
        return loss


class Indexer(KeyChooser):
    """Indexer of one layer (DeepSeek sparse attention); parameters have the names of HuggingFace files."""

    def __init__(self, config: ModelConfig, backend: BackendConfig) -> None:
        super().__init__(config, backend)
        attention = config.attention
        self.interleaved = attention.index_interleaved
        self.wq_b = Linear(attention.q_lora_rank, attention.index_n_heads * self.dim)
        self.wk = Linear(config.hidden_size, self.dim)
        self.k_norm = LayerNorm(self.dim, eps=1e-6)

    def project(
        self, x_BsH: Tensor, latent_BsL: Tensor, setup: AttentionSetup
    ) -> tuple[Tensor, Tensor]:
        cos, sin = (self.ranks.local_shard(angle) for angle in (setup.cos, setup.sin))
        q_BsJD = self.wq_b(latent_BsL).unflatten(-1, (-1, self.dim))
        k_Bs1D = self.k_norm(self.wk(x_BsH)).unsqueeze(2)
        q_BsJD, k_Bs1D = (
            setup.rope.rotate(x, cos, sin, self.interleaved, 0) for x in (q_BsJD, k_Bs1D)
        )
        return q_BsJD, gather_row(self.ranks.all_gather(k_Bs1D.squeeze(2)), setup.key_gather)
