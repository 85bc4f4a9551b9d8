"""Grouped-query attention (arXiv 2305.13245) and multi-head latent attention (DeepSeek-V2).

Latent attention is section 2.1 of arXiv 2405.04434. Queries have the S positions of this rank, keys
the R of whole sequences. But between Ulysses' all-to-alls both have R, and in ring attention, whose
kernel passes keys from rank to rank, both have S. Letters: ``automoe.model``; here L is a latent's
width.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from automoe.comm.communicators import SINGLE_RANK, Communicator, first_of_rank
from automoe.comm.local_shard import local_shard
from automoe.comm.tokens import Tokens
from automoe.config.context import expanded_width, gathers_latents
from automoe.config.schema import ModelConfig, has_blocks, has_indexer, has_rotation, window_of
from automoe.kernels.attention import prepare_cuda
from automoe.kernels.rotation import rotary_cos_sin, softmax_scale
from automoe.model.attention_masks import QueryBlock, document_ids, seen_keys
from automoe.model.backend import BackendConfig
from automoe.model.compressed_attention import Compression
from automoe.model.indexer import Indexer, IndexInputs
from automoe.model.linear import Features, Linear
from automoe.model.norm import OutputNorm, norm_over_ranks
from automoe.model.params import sizes_of
from automoe.model.rope import rotary_dim
from automoe.model.rows import exchange_heads, exchange_positions, gather_row, own_heads, whole_rows
from automoe.moe.balance import attach_loss
from automoe.passes.calls import bind
from automoe.passes.recompute import save_for_recompute

# DeepSeek's latent norms use this epsilon for any value of the model's own epsilon.
LATENT_NORM_EPS = 1e-6


class AttentionSetup:
    """Rotation angles, masks and attention kernel, made once for all layers of a forward pass.

    Each module for multi-token prediction gets its own instance (``Decoder.mtp_states``). B, S:
    this rank's sequences and positions; R: positions of the whole sequence.

    Args:
        tokens: positions, document ids and the like (``Tokens``) at the S positions.
        dtype: dtype of cos and sin, unless ``backend.rope.angle_dtype`` is set.
        layers: numbers of the layers that get masks.

    Attributes:
        cos, sin: [B, S, 1, P], cos and sin of the angles of P pairs of rotary dims.
        key_gather: ranks from which keys and values are gathered.
        head_exchange: ranks with which positions are exchanged for heads (Ulysses).
        doc_ids: document ids [B, S], or [B, R] if a layer sees whole sequences; None: no sequence
            holds two documents.
        blocks: {positions of the sliding window (0: none): blocks of queries, each with the range
            of keys that it reads and its mask}.
        seen: [B, S, R] bool, True where a query may see a key; None for models without indexers.
        chosen: [B, S, R] bool, the keys that the last indexer chose, for layers that share them.
        compression: angles and windows of compressed attention; other kinds have none.
    """

    chosen: Tensor | None = None
    compression: Compression

    def __init__(
        self,
        config: ModelConfig,
        tokens: Tokens,
        backend: BackendConfig,
        dtype: torch.dtype,
        layers: Collection[int],
    ) -> None:
        attention = config.attention
        dim = rotary_dim(attention, config.rope)
        self.rope = backend.rope
        ranks = backend.pg_collection
        self.key_gather, self.head_exchange = ranks.key_gather, ranks.head_exchange
        self.cos, self.sin = rotary_cos_sin(
            config.rope, dim, tokens.positions, self.rope.angle_dtype or dtype
        )
        self.interleaved = config.rope.interleaved
        # After an exchange of positions for heads (delta nets always exchange under cp) a rank has
        # whole sequences, and else the queries of its own positions.
        exchanges = self.head_exchange.num_ranks > 1
        exchanged = tokens
        if exchanges or (attention.linear_num_key_heads and ranks.cp.num_ranks > 1):
            exchanged = whole_rows(tokens, ranks.cp)
        self.doc_ids = document_ids(exchanged, SINGLE_RANK, backend.always_masked)
        queries = exchanged if exchanges else tokens
        self.blocks = {
            window: backend.masks(queries, self.key_gather, window, backend.always_masked)
            for window in {window_of(attention, n) for n in layers if has_blocks(attention, n)}
        }
        self.tokens = tokens
        self.seen = None
        if attention.kind == "compressed":
            angle_dtype = self.rope.angle_dtype or dtype
            self.compression = Compression(
                config, tokens.positions, self.doc_ids, angle_dtype, layers
            )
        elif attention.index_topk:
            docs_BS = document_ids(tokens, self.key_gather, backend.always_masked)
            self.seen = seen_keys(tokens, self.key_gather, docs_BS=docs_BS)
        self._kernel = backend.attention_kernel
        if tokens.positions.device.type == "cuda":
            prepare_cuda()

    def rotate(self, x_BSND: Tensor, start: int = 0) -> Tensor:
        return self.rope.rotate(x_BSND, self.cos, self.sin, self.interleaved, start)

    def query_blocks(self, window: int = 0, chosen_BSR: Tensor | None = None) -> list[QueryBlock]:
        """Return blocks of this rank's queries, each with the range of keys it reads and its mask.

        Args:
            window: positions of the sliding window, 0 for none.
            chosen_BSR: the mask, True where a query attends to a key; None: the mask is made from
                causality, documents and window.
        """
        if chosen_BSR is None:
            return self.blocks[window]
        return [
            block._replace(mask=chosen_BSR[:, None, block.queries, block.keys])
            for block in self.blocks[window]
        ]

    def softmax_attention(
        self, q_BSND, k_BRGD, v_BRGD, scale: float, window: int = 0, sinks_N=None, chosen_BSR=None
    ) -> Tensor:
        """Return softmax attention's output [B, S, N, Dv], for v [B, R, G, Dv].

        It is computed by ``BackendConfig.attention_kernel``. Modules call this method wrapped
        by ``LayerCalls.core_attention``, for example in recomputation.

        Args:
            scale: factor of the products of queries and keys.
            window: positions of the layer's sliding window; 0: none.
            sinks_N: one more logit per head, which takes probability but has no value; None: no
                sinks.
            chosen_BSR: True where a query attends to a key; None: queries attend to all keys that
                they may see.
        """
        blocks = self.query_blocks(window, chosen_BSR)
        if self.key_gather.num_ranks == 1:
            return self._kernel(q_BSND, k_BRGD, v_BRGD, blocks[0].mask, scale, sinks_N)
        out = [
            self._kernel(q_BSND[:, q], k_BRGD[:, kv], v_BRGD[:, kv], mask, scale, sinks_N)
            for q, kv, mask in blocks
        ]
        return torch.cat(out, dim=1)


def own_features(ranks: Communicator, num_heads: int, head_dim: int) -> Features:
    """Return the slices of a projection's output features that belong to this rank's heads.

    The projection has ``num_heads`` heads of ``head_dim`` features, which are spread over
    ``ranks``; if there are more ranks than heads, several ranks use the same head. None: a single
    rank uses all.
    """
    if ranks.num_ranks == 1:
        return None
    start = first_of_rank(ranks, num_heads) * head_dim
    return (slice(start, start + max(num_heads // ranks.num_ranks, 1) * head_dim),)


class GroupedQueryAttention(nn.Module):
    """Attention in which num_heads query heads share num_kv_heads key and value heads.

    Optional: biases, RMSNorm on q and k, of each head or of all together (OLMoE, arXiv 2409.02060,
    section 4.2), clipping of q, k and v to +-``clip_qkv``, an output gate (Qwen3-Next) after a norm
    of outputs (Muse-Spark), a sliding window or no rotation (by layer), attention sinks (GPT-OSS,
    arXiv 2508.10925, section 2.3).
    """

    def __init__(self, config: ModelConfig, layer: int, backend: BackendConfig) -> None:
        super().__init__()
        attention = config.attention
        hidden = config.hidden_size
        calls = backend.calls(layer)
        self.tp = backend.pg_collection.tp
        self.gather = calls.gather(self.tp.all_gather)
        self.num_heads, self.head_dim = attention.num_heads, attention.head_dim
        self.num_kv_heads = attention.num_kv_heads
        bias = attention.qkv_bias
        self.q_features = own_features(self.tp, attention.num_heads, self.head_dim)
        self.k_features = own_features(self.tp, attention.num_kv_heads, self.head_dim)
        # Ranks that outnumber key and value heads keep the whole projection and use some rows.
        kv_features = self.k_features if attention.num_kv_heads < self.tp.num_ranks else None
        sizes = sizes_of(config)
        self.output_gate = attention.joint_output_gate
        # With the rows of a gate each head has those of its query first.
        self.q_proj = Linear(hidden, sizes["Q"] * self.head_dim, bias)
        split, width = attention.split_output_gate, attention.num_heads * self.head_dim
        self.gate_proj = Linear(hidden, width) if split else None
        self.k_proj = Linear(hidden, attention.num_kv_heads * self.head_dim, bias, kv_features)
        self.v_proj = Linear(hidden, attention.num_kv_heads * self.head_dim, bias, kv_features)
        self.o_proj = Linear(width, hidden, attention.o_bias)
        self.sinks = nn.Parameter(torch.empty(attention.num_heads)) if attention.sinks else None
        self.window = window_of(attention, layer)
        self.clip = attention.clip_qkv
        self.over_heads = attention.qk_norm_over_heads
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if attention.qk_scale_factor is not None:
            self.q_norm = self.k_norm = OutputNorm(config.norm_eps)
        elif attention.qk_norm:
            of_norm = config.norm_eps, config.zero_centered_norms
            self.q_norm = backend.norm(sizes["Yq"], *of_norm)
            self.k_norm = backend.norm(sizes["Yk"], *of_norm)
        self.core_attention = calls.core_attention(AttentionSetup.softmax_attention)
        self.scale = attention.multiplier or softmax_scale(config.rope, self.head_dim)
        self.scale *= attention.qk_scale_factor or 1
        self.output_norm = OutputNorm(config.norm_eps if attention.output_norm else None)
        self.rotates = has_rotation(attention, layer)

    def forward(self, x_BsH: Tensor, setup: AttentionSetup) -> Tensor:
        """Return the attention output [B, s, H] for hidden states [B, s, H]."""
        x_BSH = self.gather(x_BsH)
        heads = (*x_BSH.shape[:2], -1, self.head_dim)
        q_BSND = self.q_proj(x_BSH)
        gate = None if self.gate_proj is None else self.gate_proj(x_BSH).view(heads)
        if self.output_gate:
            q_BSND, gate = q_BSND.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        q_BSND, k_BSGD = self._norm(q_BSND.reshape(heads), self.k_proj(x_BSH).view(heads))
        v_BSGD = self.v_proj(x_BSH).view(heads)
        if self.clip is not None:
            q_BSND, k_BSGD, v_BSGD = (
                x.clamp(-self.clip, self.clip) for x in (q_BSND, k_BSGD, v_BSGD)
            )
        if self.rotates:
            q_BSND, k_BSGD = setup.rotate(q_BSND), setup.rotate(k_BSGD)
        keys_and_values = (gather_row(x, setup.key_gather) for x in (k_BSGD, v_BSGD))
        exchanged = exchange_heads(setup.head_exchange, q_BSND, *keys_and_values)
        sinks_N = (
            None if self.sinks is None else own_heads(setup.head_exchange, local_shard(self.sinks))
        )
        out_BSND = self.core_attention(setup, *exchanged, self.scale, self.window, sinks_N)
        out_BSND = self.output_norm(exchange_positions(setup.head_exchange, out_BSND))
        out_BSND = out_BSND if gate is None else out_BSND * gate.sigmoid()
        return self.o_proj.project_and_scatter(out_BSND.flatten(2), self.tp)

    def _norm(self, q_BSND: Tensor, k_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k after their RMSNorms, of each head or of all heads of all tp ranks together.

        Without norms they are returned as they are.
        """
        if not self.over_heads:
            return self.q_norm(q_BSND), self.k_norm(k_BSGD)
        both = q_BSND.flatten(2), k_BSGD.flatten(2)
        norms = self.q_norm, self.k_norm
        if self.tp.num_ranks == 1:
            q, k = (norm(x) for norm, x in zip(norms, both, strict=True))
        else:
            q, k = norm_over_ranks(norms, both, (self.q_features, self.k_features), self.tp)
        return q.view_as(q_BSND), k.view_as(k_BSGD)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek): keys and values expanded from one latent per token.

    The latent has kv_lora_rank numbers. With ``index_topk`` a query attends only to the keys that
    an indexer chooses: the layer's own, or that of the last layer before it that has one.
    """

    def __init__(self, config: ModelConfig, layer: int, backend: BackendConfig) -> None:
        super().__init__()
        attention = config.attention
        hidden = config.hidden_size
        calls = backend.calls(layer)
        self.tp = backend.pg_collection.tp
        self.gather = calls.gather(self.tp.all_gather)
        self.num_heads = attention.num_heads
        self.expanded = expanded_width(attention, self.tp.num_ranks)
        self.nope_dim = attention.qk_nope_head_dim
        self.rope_dim = attention.qk_rope_head_dim
        self.v_dim = attention.v_head_dim
        self.kv_lora_rank = attention.kv_lora_rank
        qk_dim = self.nope_dim + self.rope_dim
        self.q_lora_rank = attention.q_lora_rank
        if self.q_lora_rank is None:
            self.q_proj = Linear(hidden, self.num_heads * qk_dim)
        else:
            self.q_a_proj = Linear(hidden, self.q_lora_rank)
            self.q_a_layernorm = backend.norm(self.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(self.q_lora_rank, self.num_heads * qk_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, self.kv_lora_rank + self.rope_dim)
        self.kv_a_layernorm = backend.norm(self.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(self.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_dim))
        self.o_proj = Linear(self.num_heads * self.v_dim, hidden)
        self.core_attention = calls.core_attention(AttentionSetup.softmax_attention)
        self.wrapped_project_up = bind(calls.project_up, self.project_up)
        self.scale = softmax_scale(config.rope, qk_dim)
        self.latent_scale = 1.0
        if attention.scale_latents:
            self.scale *= (hidden / self.q_lora_rank) ** 0.5
            self.latent_scale = (hidden / self.kv_lora_rank) ** 0.5
        self.sparse = attention.index_topk > 0 and not backend.indexer_warmup
        self.indexer = Indexer(config, backend) if has_indexer(attention, layer) else None

    def forward(self, x_BsH: Tensor, setup: AttentionSetup) -> Tensor:
        """Return the attention output for hidden states, both [B, s, H].

        If the layer has an indexer, the output's backward pass also runs that of the indexer's
        loss.
        """
        # Each rank computes the latents of its s positions and gathers latents, which are narrower
        # than x. The projections up from the latents are sharded by heads.
        query = x_BsH if self.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x_BsH))
        query_BSL = self.gather(query)
        widths = self.kv_lora_rank, self.rope_dim
        latent_BsL, k_rope_BsD = self.kv_a_proj_with_mqa(x_BsH).split(widths, dim=-1)
        latent_BsL = self.kv_a_layernorm(latent_BsL)
        if self.latent_scale != 1:
            latent_BsL = latent_BsL * self.latent_scale
        latent = self.gather(latent_BsL)
        k_rope = setup.rotate(self.gather(k_rope_BsD).unsqueeze(2)).squeeze(2)
        if setup.key_gather.num_ranks > 1 and self.gathers_latents(latent):
            row_BRL = gather_row(torch.cat((latent, k_rope), dim=-1), setup.key_gather)
            latent, k_rope = row_BRL.split(widths, dim=-1)
        projected = self.wrapped_project_up(query_BSL, latent, k_rope, setup)
        q_BSND, k_BRND, v_BRND = projected
        inputs = None if self.indexer is None else self.indexer(x_BsH, query, setup)
        # Compiled models have no indexers, and torch 2.11 cannot trace the call.
        sparse = self.sparse or self.indexer is not None
        chosen_BSR = save_for_recompute(self._choose, inputs, setup) if sparse else None
        mask_BSR = chosen_BSR if self.sparse else None
        out_BSND = self.core_attention(setup, q_BSND, k_BRND, v_BRND, self.scale, 0, None, mask_BSR)
        out_BSND = exchange_positions(setup.head_exchange, out_BSND)
        out_BsH = self.o_proj.project_and_scatter(out_BSND.flatten(2), self.tp)
        if self.indexer is None:
            return out_BsH
        loss = self.indexer.loss(inputs, chosen_BSR, q_BSND, k_BRND, self.scale, setup)
        return out_BsH if loss is None else attach_loss(out_BsH, loss)

    def _choose(self, inputs: IndexInputs | None, setup: AttentionSetup) -> Tensor | None:
        if self.indexer is not None:
            setup.chosen = self.indexer.choose(inputs, setup.seen)
        return setup.chosen

    def gathers_latents(self, latent: Tensor) -> bool:
        return gathers_latents(
            self.kv_lora_rank, self.expanded, latent.device.type, latent.element_size()
        )

    def project_up(
        self, query_BSL: Tensor, latent: Tensor, k_rope: Tensor, setup: AttentionSetup
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, S, N, D], k [B, R, N, D] and v [B, R, N, Dv] of this rank's N heads.

        If positions are exchanged for heads (Ulysses), q covers whole sequences too.

        Args:
            query_BSL: the latent of queries, or the hidden states if queries have no latent.
            latent: [B, S or R, latent width] the latent of keys and values; of S positions, if keys
                and values are gathered after their expansion.
            k_rope: [B, S or R, rotary dims] of keys at the same positions, already rotated.
        """
        q_proj = self.q_proj if self.q_lora_rank is None else self.q_b_proj
        q_BSND = q_proj(query_BSL).unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        if setup.key_gather.num_ranks > 1 and not self.gathers_latents(latent):
            kv, k_rope = (gather_row(x, setup.key_gather) for x in (kv, k_rope))
        q_BSND = setup.rotate(q_BSND, self.nope_dim)
        if setup.head_exchange.num_ranks > 1:
            # All heads share the rotary dims of keys, so these are gathered once.
            k_rope = gather_row(k_rope, setup.head_exchange)
            widths = q_BSND.shape[-1], kv.shape[-1]
            (joined,) = exchange_heads(setup.head_exchange, torch.cat((q_BSND, kv), dim=-1))
            q_BSND, kv = joined.split(widths, dim=-1)
        k_BRND, v_BRND = setup.rope.join_keys(kv, k_rope, self.nope_dim)
        return q_BSND, k_BRND, v_BRND
