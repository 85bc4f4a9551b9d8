"""Attention: grouped-query (arXiv 2305.13245) and multi-head latent (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shapes: B rows, S positions of this rank, R positions of the whole row, H hidden, N heads, D head dim.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from automoe.config.schema import ModelConfig, window_of
from automoe.model.attention_kernels import prepare_cuda
from automoe.model.linear import Linear, local_part
from automoe.model.rope import rotary_cos_sin, rotary_dim, softmax_scale
from automoe.model.runtime import Runtime
from automoe.moe.communicators import SINGLE_RANK, Communicator, first_of_rank
from automoe.moe.tokens import Tokens

# DeepSeek's latent norms keep this epsilon whatever the model's own is.
LATENT_NORM_EPS = 1e-6


class AttentionContext:
    """What all layers of one forward share: rotation angles, masks, how K and V are exchanged and used."""

    def __init__(self, config: ModelConfig, tokens: Tokens, runtime: Runtime, dtype: torch.dtype) -> None:
        attention = config.attention
        dim = rotary_dim(attention, config.rope)
        self.rope, self.keys = runtime.rope, runtime.comms.keys
        self.cos, self.sin = rotary_cos_sin(config.rope, dim, tokens.positions, self.rope.angle_dtype or dtype)
        self.interleaved = config.rope.interleaved
        self.mask = attention_mask(tokens, self.keys, always=runtime.always_masked)
        self.window = attention.sliding_window
        self.window_mask = None
        if self.window:
            self.window_mask = attention_mask(tokens, self.keys, self.window, runtime.always_masked)
        self._attend = runtime.attend
        if tokens.positions.device.type == "cuda":
            prepare_cuda()

    def rotate(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        return self.rope.rotate(x, self.cos, self.sin, self.interleaved, start)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert window in (0, self.window)
        return self._attend(q, k, v, self.window_mask if window else self.mask, scale, sinks)


def attention_mask(
    tokens: Tokens, keys: Communicator = SINGLE_RANK, window: int = 0, always: bool = False
) -> torch.Tensor | None:
    """[B, 1, S, R] True where a query may look, or None where plain causality says it all.

    With ``window`` no further back than that many positions of the row, its own included. With ``always`` rows
    with document ids get a mask whatever the ids are: compiled code is made for one case.
    """
    whole = keys.num_ranks == 1
    doc_ids = tokens.doc_ids
    if doc_ids is not None and doc_ids.device.type == "cpu" and whole and not always:
        # One document a row is the common case and lets SDPA take its causal kernel. Only asked on
        # the CPU: on a GPU the answer would cost a host sync. With a context axis this rank sees a
        # part of the row only.
        doc_ids = None if bool((doc_ids == doc_ids[:, :1]).all()) else doc_ids
    if doc_ids is None and whole and not window:
        return None
    key_index = keys.all_gather(tokens.index)
    allowed = key_index[:, None, :] <= tokens.index[:, :, None]
    if window:
        allowed = allowed & (key_index[:, None, :] > tokens.index[:, :, None] - window)
    if doc_ids is not None:
        allowed = allowed & (keys.all_gather(doc_ids)[:, None, :] == doc_ids[:, :, None])
    return allowed[:, None]


class GroupedQueryAttention(nn.Module):
    """num_heads query heads share num_kv_heads key and value heads.

    Optional: biases, RMSNorm on q and k, an output gate (Qwen3-Next), a sliding window (by layer), attention sinks (GPT-OSS, arXiv
    2508.10925, section 2.3).
    """

    def __init__(self, config: ModelConfig, layer: int, runtime: Runtime) -> None:
        super().__init__()
        attention, hidden, self.sequence = config.attention, config.hidden_size, runtime.comms.sequence
        self.head_dim = attention.head_dim
        bias, kv_rows = attention.qkv_bias, self._kv_rows(attention.num_kv_heads)
        self.output_gate = attention.output_gate
        # With an output gate a head's rows are those of its query, then those of its gate.
        self.q_proj = Linear(hidden, (1 + self.output_gate) * attention.num_heads * self.head_dim, bias)
        self.k_proj = Linear(hidden, attention.num_kv_heads * self.head_dim, bias, kv_rows)
        self.v_proj = Linear(hidden, attention.num_kv_heads * self.head_dim, bias, kv_rows)
        self.o_proj = Linear(attention.num_heads * self.head_dim, hidden, attention.o_bias)
        self.sinks = nn.Parameter(torch.empty(attention.num_heads)) if attention.sinks else None
        self.window = window_of(attention, layer)
        norm = partial(runtime.norm, self.head_dim, config.norm_eps, config.zero_centered_norms)
        self.q_norm = norm() if attention.qk_norm else nn.Identity()
        self.k_norm = norm() if attention.qk_norm else nn.Identity()
        self.attend = AttentionContext.attend
        self.scale = softmax_scale(config.rope, self.head_dim)

    def _kv_rows(self, num_heads: int) -> slice | None:
        """Output rows that this rank uses where key and value heads are fewer than the ranks, which keep them all."""
        if num_heads >= self.sequence.num_ranks:
            return None
        start = first_of_rank(self.sequence, num_heads) * self.head_dim
        return slice(start, start + self.head_dim)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        x = self.sequence.all_gather(x)
        heads = (*x.shape[:2], -1, self.head_dim)
        q, gate = self.q_proj(x), None
        if self.output_gate:
            q, gate = q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        q = context.rotate(self.q_norm(q.reshape(heads)))
        k = context.rotate(self.k_norm(self.k_proj(x).view(heads)))
        v = self.v_proj(x).view(heads)
        k, v = context.keys.all_gather(k), context.keys.all_gather(v)
        sinks = None if self.sinks is None else local_part(self.sinks)
        out = self.attend(context, q, k, v, self.scale, self.window, sinks)
        out = out if gate is None else out * gate.sigmoid()
        return self.o_proj.reduce_scatter(out.flatten(2), self.sequence)


class LatentAttention(nn.Module):
    """MLA: keys and values are expanded from one latent of kv_lora_rank numbers a token."""

    def __init__(self, config: ModelConfig, runtime: Runtime) -> None:
        super().__init__()
        attention, hidden, self.sequence = config.attention, config.hidden_size, runtime.comms.sequence
        self.num_heads = attention.num_heads
        self.nope_dim, self.rope_dim = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        self.v_dim, self.kv_lora_rank = attention.v_head_dim, attention.kv_lora_rank
        qk_dim = self.nope_dim + self.rope_dim
        self.q_lora_rank = attention.q_lora_rank
        if self.q_lora_rank is None:
            self.q_proj = Linear(hidden, self.num_heads * qk_dim)
        else:
            self.q_a_proj = Linear(hidden, self.q_lora_rank)
            self.q_a_layernorm = runtime.norm(self.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(self.q_lora_rank, self.num_heads * qk_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, self.kv_lora_rank + self.rope_dim)
        self.kv_a_layernorm = runtime.norm(self.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(self.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_dim))
        self.o_proj = Linear(self.num_heads * self.v_dim, hidden)
        self.attend = AttentionContext.attend
        self.scale = softmax_scale(config.rope, qk_dim)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        # Between blocks a rank of the tp axis holds a part of the tokens. Latents are made of that part
        # and gathered, being narrower than x; the projections up from them are cut by heads.
        query = x if self.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        query = self.sequence.all_gather(query)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        latent = self.sequence.all_gather(self.kv_a_layernorm(latent))
        k_rope = context.rotate(self.sequence.all_gather(k_rope).unsqueeze(2)).squeeze(2)
        if context.keys.num_ranks > 1:
            # What other ranks need of this row is the latent, not the K and V it expands to: 576 numbers
            # a token in DeepSeek-V3 instead of 40,960.
            gathered = context.keys.all_gather(torch.cat((latent, k_rope), dim=-1))
            latent, k_rope = gathered.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        q, k, v = self.project_up(query, latent, k_rope, context)
        return self.sequence.reduce_scatter(self.o_proj(self.attend(context, q, k, v, self.scale).flatten(2)))

    def project_up(
        self, query: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of this rank's heads.

        Args:
            query: [B, S, L], the latent of queries, or [B, S, H] where they have none.
            latent: [B, R, kv_lora_rank].
            k_rope: [B, R, rope_dim], rotated.
        """
        q_proj = self.q_proj if self.q_lora_rank is None else self.q_b_proj
        q = q_proj(query).unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k, v = context.rope.join_keys(kv, k_rope, self.nope_dim)
        return context.rotate(q, self.nope_dim), k, v


def build_attention(config: ModelConfig, layer: int, runtime: Runtime) -> nn.Module:
    """The attention that ``config.attention.kind`` names, as layer number ``layer`` has it."""
    if config.attention.kind == "mla":
        return LatentAttention(config, runtime)
    return GroupedQueryAttention(config, layer, runtime)
