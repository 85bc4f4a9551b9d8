"""A small model whose weights tp and etp can cut on the grid of 128, and its rows; ranks import this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from automoe.comm.tokens import StepBatch
from automoe.config.data_schema import DataConfig
from automoe.config.schema import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
)

ROWS, SEQ_LEN, VOCAB = 4, 64, 64

MODEL = ModelConfig(
    family="deepseek_v3",
    vocab_size=VOCAB,
    hidden_size=128,
    num_layers=2,
    first_k_dense=1,
    intermediate_size=256,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=256,
    num_shared_experts=1,
    initializer_range=0.1,
    attention=AttentionConfig(
        kind="mla",
        num_heads=4,
        num_kv_heads=4,
        q_lora_rank=48,
        kv_lora_rank=40,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    ),
)
GQA = AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=128)
COMPRESSED = AttentionConfig(
    kind="compressed",
    num_heads=4,
    num_kv_heads=1,
    head_dim=128,
    q_lora_rank=48,
    qk_rope_head_dim=64,
    sliding_window=16,
    sinks=True,
    o_groups=2,
    o_lora_rank=64,
    index_topk=8,
    index_n_heads=2,
    index_head_dim=64,
    compress_ratios=[0, 4],
)
DSV4: dict[str, Any] = dict(
    attention=COMPRESSED,
    family="deepseek_v4",
    first_k_dense=0,
    hc_mult=2,
    expert_activation="clamped_swiglu",
    swiglu_alpha=1.0,
    swiglu_offset=0.0,
    router=RouterConfig(score="sqrt_softplus", expert_bias=True, num_hash_layers=1),
)
MUSE: dict[str, Any] = dict(
    attention=replace(
        GQA, qk_norm=True, qk_scale_factor=2.5, output_gate=True, split_output_gate=True, output_norm=True
    ),
    family="muse_spark_text",
    num_shared_experts=0,
    moe_latent_size=128,
    zero_centered_norms=True,
    post_norm_eps=1e-6,
    residual_gate_temperature=0.3,
    router=RouterConfig(score="sigmoid", expert_bias=True, logit_scale=0.7),
)
LONGCAT: dict[str, Any] = dict(
    attention=replace(MODEL.attention, scale_latents=True),
    family="longcat_flash",
    first_k_dense=0,
    num_shared_experts=0,
    shared_intermediate_size=MODEL.intermediate_size,
    moe_shortcut=True,
    router=RouterConfig(norm_topk_prob=False, routed_scaling_factor=2.5, expert_bias=True, num_zero_experts=4),
)
# q: a and b; kv: a and b; o; gate, up, down of the dense FFN in layer 0 and of the shared expert in layer 1.
LINEARS = 2 * 5 + 3 + 3


def config(
    fp8: str,
    mesh: dict[str, int] | None = None,
    rows: int = ROWS,
    attention: AttentionConfig = MODEL.attention,
    gate: Any = "learned",
    num_mtp_layers: int = 0,
    dispatch_dtype: Any = "auto",
    sizes: dict[str, Any] | None = None,
    **train: Any,
) -> Config:
    """``rows`` rows a micro-batch on ``mesh``; ``sizes`` are other settings of the model."""
    return Config(
        mesh=MeshConfig(**({"dp_shard": 1} | (mesh or {}))),
        model=replace(MODEL, **dict(attention=attention, num_mtp_layers=num_mtp_layers) | (sizes or {})),
        moe=MoEConfig(experts="grouped_mm", gate=gate, dispatch_dtype=dispatch_dtype),
        parallel=ParallelConfig(),
        train=TrainConfig(global_batch_size=ROWS, seq_len=SEQ_LEN, micro_batch_size=rows, fp8=fp8, **train),  # type: ignore[arg-type]
        optim=OptimConfig(lr=4e-3, warmup_steps=0, schedule="constant"),
        data=DataConfig(document_mask=False),
    )


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Rows that repeat from step to step and can be learned: each token is a function of the one before."""
    generator = torch.Generator().manual_seed(7 + step % 2)
    start = torch.randint(VOCAB, (ROWS, 1), generator=generator)
    tokens = (start + 5 * torch.arange(SEQ_LEN + 1) ** 2) % VOCAB
    rows = slice(dp_rank * ROWS // dp_size, (dp_rank + 1) * ROWS // dp_size)
    tokens = tokens[rows]
    whole = torch.zeros_like(tokens[:, :-1])
    positions = torch.arange(SEQ_LEN).expand_as(whole)
    return StepBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, whole, 0, rows.start)
