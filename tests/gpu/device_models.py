"""Models and rows for tests on one device."""

from __future__ import annotations

from dataclasses import replace

import torch

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.schema import Config, MeshConfig, MoEConfig, OptimConfig, TrainConfig
from tests.support.gpu import conf_model

SMALL = {"deepseek_v3": "small_dsv3", "qwen3_moe": "small_qwen3_moe", "mixtral": "small_mixtral"}
PUBLISHED = {"deepseek_v3": "dsv3_671b", "qwen3_moe": "qwen3_30b_a3b", "mixtral": "mixtral_8x22b"}


def small(family: str, dtype: str) -> Config:
    """Two or three layers of the family in small; weights large enough for routing to be uneven."""
    model = conf_model(SMALL[family])
    model = replace(model, num_layers=2 + model.first_k_dense, initializer_range=0.1)
    return Config(
        mesh=MeshConfig(dp_shard=1),
        model=model,
        moe=MoEConfig(
            experts="loop" if dtype == "float64" else "grouped_mm", seq_balance_coef=0.01, global_balance_coef=0.01
        ),
        train=TrainConfig(seq_len=32, global_batch_size=4, micro_batch_size=2, dtype=dtype),  # type: ignore[arg-type]
        optim=OptimConfig(lr=1e-3),
    )


def published_slice(family: str, device: torch.device) -> Config:
    """Two layers of a published model with a few experts, in bfloat16; all other widths are the model's own.

    On the CPU the widths shrink too, and only head dims stay.
    """
    model = conf_model(PUBLISHED[family])
    router = replace(model.router, num_groups=4, topk_groups=2) if model.router.num_groups > 1 else model.router
    model = replace(
        model,
        vocab_size=4096,
        num_layers=2,
        first_k_dense=min(model.first_k_dense, 1),
        num_experts=4 if family == "mixtral" else 8,
        num_experts_per_token=2,
        router=router,
    )
    seq_len = 1024
    if device.type == "cpu":
        lora = dict(q_lora_rank=32, kv_lora_rank=32) if model.attention.kind == "mla" else {}
        heads = dict(num_heads=4, num_kv_heads=4 if model.attention.kind == "mla" else 2)
        attention = replace(model.attention, **lora, **heads)
        widths = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, vocab_size=128)
        model = replace(model, attention=attention, **widths)
        seq_len = 32
    return Config(
        mesh=MeshConfig(dp_shard=1),
        model=model,
        moe=MoEConfig(seq_balance_coef=1e-4),
        train=TrainConfig(seq_len=seq_len, global_batch_size=4, micro_batch_size=2, dtype="bfloat16"),
        # A step of Adam moves an output by lr times the width: the same fall of the loss at any width.
        optim=OptimConfig(lr=0.2 / model.hidden_size),
    )


def rows(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Random rows of a step, two documents in each, the last one padded."""
    num_rows, seq_len = config.train.global_batch_size, config.train.seq_len
    assert dp_size == 1
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.model.vocab_size, (num_rows, seq_len + 1), generator=generator)
    index = torch.arange(seq_len).expand(num_rows, seq_len)
    border = seq_len // 2 + 3
    doc_ids = (index >= border).long()
    positions = index - border * doc_ids
    labels = tokens[:, 1:].clone()
    labels[:, border - 1] = IGNORE
    doc_ids[-1, -3:] = -1
    labels[-1, -4:] = IGNORE
    return StepBatch(tokens[:, :-1], labels, positions, doc_ids, 0, 0)


def same_rows(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """The rows of step 0 at every step."""
    return rows(config, 0, dp_rank, dp_size)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| in float64, wherever the two lie."""
    assert got.shape == expected.shape
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    return float((got - expected).norm() / expected.norm())
