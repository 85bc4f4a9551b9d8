"""Attention: grouped-query (arXiv 2305.13245) and multi-head latent (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shapes: B rows, S positions of this rank, R positions of the whole row, H hidden, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from automoe.config.schema import ModelConfig, window_of
from automoe.model.attention_kernels import HALF, check_cudnn, only_kernels, prepare_cuda
from automoe.model.linear import Linear, local_part
from automoe.model.norm import RMSNorm
from automoe.model.rope import Rope, rotary_cos_sin, rotary_dim, softmax_scale
from automoe.moe.communicators import SINGLE_RANK, Communicator
from automoe.moe.tokens import Tokens

# DeepSeek's latent norms keep this epsilon whatever the model's own is.
LATENT_NORM_EPS = 1e-6

# q [B, S, N, D], k [B, R, G, D], v [B, R, G, Dv], mask [B, 1, S, R] or None (causal), scale,
# sinks [N] or None -> [B, S, N, Dv]
AttentionFn = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, torch.Tensor | None], torch.Tensor
]


class AttentionContext:
    """What all layers of one forward share: rotation angles, masks, how K and V are exchanged and used."""

    def __init__(
        self,
        config: ModelConfig,
        tokens: Tokens,
        keys: Communicator,
        dtype: torch.dtype,
        attend: AttentionFn,
        always_masked: bool = False,
        rope: Rope | None = None,
    ) -> None:
        attention = config.attention
        dim = rotary_dim(attention, config.rope)
        self.rope = rope or Rope()
        self.cos, self.sin = rotary_cos_sin(config.rope, dim, tokens.positions, self.rope.angle_dtype or dtype)
        self.interleaved = config.rope.interleaved
        self.keys = keys
        self.mask = attention_mask(tokens, keys, always=always_masked)
        self.window = attention.sliding_window
        self.window_mask = attention_mask(tokens, keys, self.window, always_masked) if self.window else None
        self._attend = attend
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


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
    kernel: str = "sdpa",
) -> torch.Tensor:
    """Softmax attention. q [B, S, N, D], k [B, R, G, D], v [B, R, G, Dv] with G dividing N -> [B, S, N, Dv].

    ``sinks`` [N] are scores of one more key a head, which every query sees and which has no value.
    ``kernel`` is that of ``kernels.attention``; see ``automoe.model.attention_kernels``.
    """
    if sinks is not None:
        out = attend(*_with_sink_key(q, k, v, mask, scale, sinks), scale, None, kernel)
        return out[:, out.shape[1] - q.shape[1] :, :, : v.shape[-1]]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    value_dim, device = v.shape[-1], q.device.type
    if value_dim < q.shape[-1] and (kernel == "flash" or (kernel == "sdpa" and device == "cpu")):
        # Flash wants equal head dims; on the CPU zero columns cost less than the unfused path.
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    if k.shape[1] != q.shape[1] and device == "cuda" and kernel == "sdpa":
        if mask is not None or q.dtype not in HALF:
            # The efficient kernel may be the only fused one left, and takes no grouped heads.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    with only_kernels(kernel, device, q.shape[-1], v.shape[-1]):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
    return out[..., :value_dim].transpose(1, 2)


def _with_sink_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Arguments of an attention without sinks that computes one with them, so that fused kernels serve both.

    A key is put in front of all others, with a value of zeros. One more dim of the queries holds the head's
    sink, and is one in that key and zero in the others. Without a mask a query of zeros goes in front as
    well: the others then see the new key and what they saw before by causality alone.
    """
    extra = 8 - q.shape[-1] % 8  # at least one dim, and as many as fused kernels want
    column = F.pad((sinks.to(q.dtype) / scale).unsqueeze(1), (0, extra - 1))
    q = torch.cat((q, column.expand(*q.shape[:3], extra)), dim=-1)
    dim = k.shape[-1]
    k, v = F.pad(k, (0, extra, 0, 0, 1, 0)), F.pad(v, (0, q.shape[-1] - v.shape[-1], 0, 0, 1, 0))
    k[:, 0, :, dim] = 1
    if mask is None:
        return F.pad(q, (0, 0, 0, 0, 1, 0)), k, v, None
    return q, k, v, F.pad(mask, (1, 0), value=True)


class GroupedQueryAttention(nn.Module):
    """num_heads query heads share num_kv_heads key and value heads.

    Optional: biases, RMSNorm on q and k, an output gate (Qwen3-Next), a sliding window (by layer), attention sinks (GPT-OSS, arXiv
    2508.10925, section 2.3).
    """

    def __init__(self, config: ModelConfig, layer: int, sequence: Communicator = SINGLE_RANK) -> None:
        super().__init__()
        attention, hidden = config.attention, config.hidden_size
        self.head_dim = attention.head_dim
        bias = attention.qkv_bias
        self.output_gate = attention.output_gate
        # With an output gate a head's rows are those of its query, then those of its gate.
        self.q_proj = Linear(hidden, (1 + self.output_gate) * attention.num_heads * self.head_dim, bias)
        self.k_proj = Linear(hidden, attention.num_kv_heads * self.head_dim, bias)
        self.v_proj = Linear(hidden, attention.num_kv_heads * self.head_dim, bias)
        self.o_proj = Linear(attention.num_heads * self.head_dim, hidden, attention.o_bias)
        self.sinks = nn.Parameter(torch.empty(attention.num_heads)) if attention.sinks else None
        self.window = window_of(attention, layer)
        norm = partial(RMSNorm, self.head_dim, config.norm_eps, config.zero_centered_norms)
        self.q_norm = norm() if attention.qk_norm else nn.Identity()
        self.k_norm = norm() if attention.qk_norm else nn.Identity()
        self.sequence = sequence
        self.attend = AttentionContext.attend
        self.scale = softmax_scale(config.rope, self.head_dim)

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
        return self.o_proj.summed(out.flatten(2), self.sequence)


class LatentAttention(nn.Module):
    """MLA: keys and values are expanded from one latent of kv_lora_rank numbers a token."""

    def __init__(self, config: ModelConfig, sequence: Communicator = SINGLE_RANK) -> None:
        super().__init__()
        attention, hidden = config.attention, config.hidden_size
        self.num_heads = attention.num_heads
        self.nope_dim, self.rope_dim = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        self.v_dim, self.kv_lora_rank = attention.v_head_dim, attention.kv_lora_rank
        qk_dim = self.nope_dim + self.rope_dim
        self.q_lora_rank = attention.q_lora_rank
        if self.q_lora_rank is None:
            self.q_proj = Linear(hidden, self.num_heads * qk_dim)
        else:
            self.q_a_proj = Linear(hidden, self.q_lora_rank)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(self.q_lora_rank, self.num_heads * qk_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, self.kv_lora_rank + self.rope_dim)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(self.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_dim))
        self.o_proj = Linear(self.num_heads * self.v_dim, hidden)
        self.sequence = sequence
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


def attention_fn(kernel: str) -> AttentionFn:
    """``attend`` with the kernel that ``kernels.attention`` names.

    Raises:
        BackendError: cuDNN is to be forced, and this machine's is wrong.
    """
    if kernel == "cudnn":
        check_cudnn()
    return partial(attend, kernel=kernel)


def build_attention(config: ModelConfig, layer: int, sequence: Communicator) -> nn.Module:
    """The attention that ``config.attention.kind`` names, as layer number ``layer`` has it."""
    if config.attention.kind == "mla":
        return LatentAttention(config, sequence)
    return GroupedQueryAttention(config, layer, sequence)
