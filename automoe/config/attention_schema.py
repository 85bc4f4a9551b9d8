"""Configuration of rotary embeddings and of attention, two sections of ``automoe.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class RopeConfig:
    """Rotary position embedding and its scaling to longer rows (``rope_parameters`` of transformers).

    ``yarn`` is YaRN (arXiv 2309.00071) with DeepSeek's mscale; ``llama3`` is Llama 3.1's scaling.
    With ``extends``, a checkpoint is trained on with this scaling instead of its own.
    """

    theta: float = 10000.0  # base of the rotation frequencies
    # rotate pairs (2i, 2i+1), as DeepSeek stores them, instead of (i, i + D/2)
    interleaved: bool = False
    # gqa: share of a head's dims that are rotated, counted from the first
    partial_rotary_factor: float = 1.0
    # the checkpoint of hf_path is trained on with the scaling of this section, for longer rows than
    # its own; theta and the kind of rotation stay its own
    extends: bool = False
    scaling: Literal["none", "yarn", "llama3"] = "none"
    factor: float = 1.0  # ratio of the longest row after scaling to original_seq_len
    # longest row that the model was trained on before scaling; 0: with extends that of the checkpoint,
    # else 4096
    original_seq_len: int = 0
    # yarn: dims with more than this many rotations over original_seq_len keep their frequency
    beta_fast: float = 32.0
    # yarn: dims with fewer rotations than this have their frequency divided by factor; dims
    # between beta_slow and beta_fast are interpolated
    beta_slow: float = 1.0
    # yarn: round the two ends of the interpolated range to whole dims (false for GPT-OSS)
    truncate: bool = True
    # yarn, with m(x) = 1 + 0.1 * x * ln(factor): rotated dims are multiplied by
    # m(mscale) / m(mscale_all_dim); if either is 0, by m(1)
    mscale: float = 0.0
    # yarn and llama3: attention logits are multiplied by m(mscale_all_dim)^2; 0: no scaling
    mscale_all_dim: float = 0.0
    # yarn: rotated dims are multiplied by this number instead; null: as the mscales say
    attention_factor: float | None = None
    # llama3: dims with fewer rotations than this over original_seq_len have their frequency
    # divided by factor
    low_freq_factor: float = 1.0
    # llama3: dims with more rotations than this keep their frequency; dims between
    # low_freq_factor and high_freq_factor are interpolated
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if not (self.original_seq_len or self.extends):
            self.original_seq_len = 4096


@dataclass
class AttentionConfig:
    """Settings of attention, and of gated delta nets that replace it in some layers.

    ``kind`` is grouped-query (``gqa``), multi-head latent (``mla``) or ``compressed`` attention
    (DeepSeek-V4); a key whose comment begins with one of the three applies to it alone. ``index_*``
    are for sparse attention (DeepSeek-V3.2 and V4), ``linear_*`` for gated delta nets (Qwen3-Next).
    Every ``full_attention_interval``-th layer has full attention; those between have a delta net or
    the ``sliding_window``.
    """

    kind: Literal["gqa", "mla", "compressed"] = "gqa"
    num_heads: int = 8  # query heads
    num_kv_heads: int = 8  # gqa: key/value heads; divides num_heads
    head_dim: int = 32  # gqa and compressed: width of a head
    qk_norm: bool = False  # gqa: RMS norm of each head's query and key
    # gqa: qk_norm is over the queries, or keys, of all heads together (OLMoE, MiniMax-M2)
    qk_norm_over_heads: bool = False
    # gqa: queries are multiplied by it after qk_norm, whose norms then have no weight (Muse-Spark);
    # null: norms have weights
    qk_scale_factor: float | None = None
    # gqa: largest absolute value of queries and keys (after their norm) and values (OLMoE)
    clip_qkv: float | None = None
    # gqa: factor of the products of queries and keys (Granite); null: head_dim ** -0.5
    multiplier: float | None = None
    qkv_bias: bool = False  # biases in the projections to queries, keys and values
    # mla and compressed: rank of the query projection; null (mla): one full matrix
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0  # mla: width of the latent that keys and values are projected from
    qk_nope_head_dim: int = 0  # mla: dims of a head's query and key without rotary embedding
    # mla: queries are multiplied by (hidden_size / q_lora_rank) ** 0.5, and the latent of keys and
    # values by the same of kv_lora_rank (LongCat-Flash's mla_scale_q_lora and mla_scale_kv_lora)
    scale_latents: bool = False
    # mla: dims of a head's query and key with rotary embedding; all heads share the key's.
    # compressed: last dims of a head, which rotate
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0  # mla: width of a head's value
    # mla: keys that a query attends to, chosen by an indexer (DeepSeek-V3.2); 0: all, no indexer.
    # compressed: entries that a query attends to in layers of sparse_ratio
    index_topk: int = 0
    index_n_heads: int = 0  # mla and compressed: heads of an indexer
    # mla and compressed: width of an indexer's head; its first (compressed: last) qk_rope_head_dim
    # dims turn
    index_head_dim: int = 0
    index_interleaved: bool = False  # mla: indexers rotate pairs (2i, 2i+1), not (i, i + D/2)
    # mla: layers without an indexer, which use the choice of the last layer that has one (GLM)
    index_shared_layers: list[int] = field(default_factory=list)
    # compressed: for each layer the number of positions that one compressed entry stands for; 0: the
    # layer has no entries, and sees the sliding_window alone
    compress_ratios: list[int] = field(default_factory=list)
    # compressed: layers of this ratio pool two windows in an entry, and an indexer chooses entries
    sparse_ratio: int = 4
    # compressed: base of the rotation frequencies of layers with entries; model.rope.theta, without
    # scaling, is for the others
    compress_rope_theta: float = 160000.0
    o_groups: int = 0  # compressed: groups of heads, each with its own projection of outputs
    o_lora_rank: int = 0  # compressed: width that the outputs of a group are projected to first
    o_bias: bool = False  # gqa: a bias in the output projection
    # gqa and compressed: each head has a learned logit that joins its softmax and has no value (GPT-OSS)
    sinks: bool = False
    # gqa: multiply each head's output by the sigmoid of a second query projection (Qwen3-Next)
    output_gate: bool = False
    # output_gate has a projection of its own; false: that of queries has its rows (Qwen3-Next)
    split_output_gate: bool = False
    # gqa: RMS norm without a weight of each head's output, before the gate (Muse-Spark)
    output_norm: bool = False
    # every n-th layer has full causal attention; the layers between have the sliding window or the
    # delta net below; 1: every layer has full attention
    full_attention_interval: int = 1
    # intervals start this many layers after the first one
    full_attention_offset: int = 0
    # gqa: layers with full attention have no rotary embedding (Muse-Spark)
    nope_full_attention: bool = False
    # layers without full attention (compressed: all layers): keys that a query sees, its own
    # position included; 0: no window
    sliding_window: int = 0
    # layers without full attention: key heads of a gated delta net (Qwen3-Next), whose state runs
    # through the whole row; 0: no delta net
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0  # delta net: value heads, a multiple of its key heads
    linear_key_head_dim: int = 0  # delta net: width of a key head
    linear_value_head_dim: int = 0  # delta net: width of a value head
    linear_conv_kernel_dim: int = 4  # delta net: tokens under its causal convolution
    # delta net: queries, keys and values have one projection, gates, betas and decays one each
    # (Qwen3.5); false: all have two, which go from key head to key head (Qwen3-Next)
    linear_split_projections: bool = False

    @property
    def qk_norm_weights(self) -> bool:
        """True if norms of queries and keys have weights."""
        return self.qk_norm and self.qk_scale_factor is None

    @property
    def joint_output_gate(self) -> bool:
        """True if one weight matrix projects to queries and to the output gate."""
        return self.output_gate and not self.split_output_gate
