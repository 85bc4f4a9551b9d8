"""Padding counts nowhere, whether or not attention stays inside documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.data_schema import DataConfig
from automoe.config.schema import AttentionConfig, Config, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory
from tests.support.trajectories import run_trajectory

ROWS, SEQ, PADDING, TOP_K = 2, 16, 6, 2


def one_padded_row(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    tokens = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % config.model.vocab_size
    labels, doc_ids = tokens.roll(-1, 1), torch.zeros(ROWS, SEQ, dtype=torch.int64)
    doc_ids[-1, -PADDING:], labels[-1, -PADDING:] = -1, IGNORE
    return StepBatch(tokens, labels, torch.arange(SEQ).expand(ROWS, SEQ), doc_ids, 0, 0)


def run(ranks: RankPool, document_mask: bool, **moe: Any) -> Trajectory:
    """One step of two MoE layers."""
    config = Config(
        mesh=MeshConfig(dp_shard=1),
        model=ModelConfig(
            family="mixtral",
            vocab_size=32,
            hidden_size=16,
            num_layers=2,
            num_experts=4,
            num_experts_per_token=TOP_K,
            moe_intermediate_size=8,
            attention=AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=2, head_dim=8),
        ),
        moe=MoEConfig(experts="loop", seq_balance_coef=1.0, **moe),
        train=TrainConfig(seq_len=SEQ, global_batch_size=ROWS, micro_batch_size=ROWS, dtype="float64"),
        data=DataConfig(document_mask=document_mask),
    )
    return ranks.run(run_trajectory, 1, config, one_padded_row, 1, keep_tensors=False)[0]


@pytest.mark.parametrize("document_mask", [True, False])
def test_expert_counts_are_the_choices_of_real_tokens(ranks: RankPool, document_mask: bool) -> None:
    seen = run(ranks, document_mask, gate="balanced")
    assert seen.expert_counts[0].sum(1).tolist() == [TOP_K * (ROWS * SEQ - PADDING)] * 2


def test_the_dropped_share_of_a_layer_is_of_its_real_tokens(ranks: RankPool) -> None:
    """Every token of a row asks for the same two of four experts, each of which takes half as many as the row is long."""
    seen = run(ranks, True, gate="one_hot", capacity_factor=1.0, drop_scope="sequence")
    asked = [SEQ, SEQ - PADDING]
    dropped = sum(tokens - SEQ // 2 for tokens in asked) / sum(asked)
    assert seen.dropped_share[0] == pytest.approx([dropped, dropped])
