"""What a training step cannot go below: its matrix products and its bytes, timed on this machine in this run."""

from __future__ import annotations

import time
from typing import Any

import torch

from automoe.config.schema import ModelConfig


def forward_gemms(config: ModelConfig, tokens: int) -> list[tuple[int, int, int, int]]:
    """(count, M, N, K) of every x[M, K] @ w[N, K].T of one forward; experts at exact balance."""
    a, hidden, layers = config.attention, config.hidden_size, config.num_layers
    if a.kind == "gqa":
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        projections = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
    else:
        q = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
        queries = [(q, hidden)] if a.q_lora_rank is None else [(a.q_lora_rank, hidden), (q, a.q_lora_rank)]
        projections = [
            *queries,
            (a.kv_lora_rank + a.qk_rope_head_dim, hidden),
            (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank),
            (hidden, a.num_heads * a.v_head_dim),
        ]
    gemms = [(layers, tokens, out, into) for out, into in projections]
    gemms.append((1, tokens, config.vocab_size, hidden))

    def feed_forward(count: int, rows: int, width: int) -> None:
        gemms.extend([(count, rows, 2 * width, hidden), (count, rows, hidden, width)])

    moe_layers = layers - config.first_k_dense
    if config.first_k_dense:
        feed_forward(config.first_k_dense, tokens, config.intermediate_size)
    if config.shared_width:
        feed_forward(moe_layers, tokens, config.shared_width)
    gemms.append((moe_layers, tokens, config.num_experts, hidden))
    rows = tokens * config.num_experts_per_token // config.num_experts
    feed_forward(moe_layers * config.num_experts, rows, config.moe_intermediate_size)
    return gemms


def attention_flops(config: ModelConfig, rows: int, seq_len: int) -> int:
    """Q K^T and P V of the causal half, forward; a backward is twice that plus a recomputed Q K^T."""
    a = config.attention
    qk = a.head_dim if a.kind == "gqa" else a.qk_nope_head_dim + a.qk_rope_head_dim
    v = a.head_dim if a.kind == "gqa" else a.v_head_dim
    return config.num_layers * rows * a.num_heads * seq_len * (seq_len + 1) * (qk + v)


def _fastest(run, times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _gemm_seconds(m: int, n: int, k: int) -> float:
    """One forward product and its two gradients, results written to preallocated storage."""
    x, w, y = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    dx, dw, out = torch.empty_like(x), torch.empty_like(w), torch.empty_like(y)
    repeat = max(1, int(2e8 / (2 * m * n * k)))  # small products are timed many at once

    def run() -> None:
        for _ in range(repeat):
            torch.mm(x, w.T, out=out)
            torch.mm(y, w, out=dx)
            torch.mm(y.T, x, out=dw)

    return _fastest(run) / repeat


def measure_floors(config: ModelConfig, rows: int, seq_len: int, num_parameters: int) -> dict[str, Any]:
    """Seconds below which a step of torch's own kernels cannot go on this core: everybody's here, since all contenders
    multiply by torch. A trainer with products of its own could go below.

    Operations: every matrix product of forward and backward at its own shape, and attention's products at
    the rate of the head's. Bytes: the optimizer reads parameter, gradient and two moments and writes three
    of them, at the bandwidth of a large copy.
    """
    tokens = rows * seq_len
    gemms = forward_gemms(config, tokens)
    gemm_seconds = sum(count * _gemm_seconds(m, n, k) for count, m, n, k in gemms)
    gemm_flops = sum(3 * 2 * count * m * n * k for count, m, n, k in gemms)
    attention = attention_flops(config, rows, seq_len) * 3
    attention_seconds = attention / (gemm_flops / gemm_seconds)

    source = torch.randn(1 << 25)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    optimizer_bytes = 7 * 4 * num_parameters
    optimizer_seconds = optimizer_bytes / bandwidth
    total = gemm_seconds + attention_seconds + optimizer_seconds
    return {
        "whose": "torch's: its products at the shapes of this model, the bandwidth of its copy; same for all contenders",
        "gemm_flops": gemm_flops,
        "gemm_seconds": gemm_seconds,
        "gemm_flops_per_second": gemm_flops / gemm_seconds,
        "attention_flops": attention,
        "attention_seconds": attention_seconds,
        "optimizer_bytes": optimizer_bytes,
        "copy_bytes_per_second": bandwidth,
        "optimizer_seconds": optimizer_seconds,
        "seconds": total,
        "tokens_per_cpu_second": tokens / total,
    }
