"""Experts and whole expert-parallel ranks without a token, everything on one expert, rows that train nothing."""

from __future__ import annotations

import math

import pytest
import torch

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.schema import AttentionConfig, Config, MeshConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import differences, run_trajectory

ROWS, SEQ, STEPS, EXPERTS = 4, 8, 3, 4
DISPATCHERS = ("alltoall", "allgather")


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Random tokens; the first two rows, a whole micro-batch of one rank, have no trained label."""
    tokens = torch.randint(0, 32, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[:2] = IGNORE
    mine = slice(dp_rank * ROWS // dp_size, (dp_rank + 1) * ROWS // dp_size)
    positions = torch.arange(SEQ).expand(ROWS, SEQ)
    return StepBatch(tokens[mine, :-1], labels[mine], positions[mine], torch.zeros_like(positions)[mine], 0, mine.start)


def train(ranks: RankPool, gate: str, top_k: int, dispatcher: str = "alltoall", **mesh: int) -> Trajectory:
    config = Config(
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=ModelConfig(
            vocab_size=32,
            hidden_size=16,
            num_layers=2,
            num_experts=EXPERTS,
            num_experts_per_token=top_k,
            moe_intermediate_size=8,
            initializer_range=0.2,
            attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        ),
        moe=MoEConfig(
            experts="loop", gate=gate, dispatcher=dispatcher, seq_balance_coef=0.02, global_balance_coef=0.03
        ),
        train=TrainConfig(seq_len=SEQ, global_batch_size=ROWS, micro_batch_size=2, dtype="float64"),
        optim=OptimConfig(lr=1e-2),
    )
    world_size = math.prod(mesh.get(axis, 1) for axis in ("pp", "dp_shard", "cp"))
    return merge_trajectories(ranks.run(run_trajectory, world_size, config, batches, STEPS))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    ("gate", "top_k", "idle"),
    [("empty", 1, [3]), ("one_hot", 2, [2, 3]), ("one_hot", 1, [1, 2, 3])],
    ids=["an expert without a token", "a rank without a token", "all tokens on one expert"],
)
def test_training_is_that_of_one_rank(ranks: RankPool, gate: str, top_k: int, idle: list[int], dispatcher: str) -> None:
    """On dp2 x ep2 rank 1 holds experts 2 and 3; its first micro-batch, rank 0's, trains nothing."""
    one = train(ranks, gate, top_k)
    two = train(ranks, gate, top_k, dispatcher, dp_shard=2, ep=2)
    assert differences(two, one, 1e-10) == []
    for seen in (one, two):
        assert all(math.isfinite(loss) and loss > 0 for loss in seen.losses)
        assert seen.expert_counts[0][:, idle].sum() == 0 and seen.expert_counts[0].sum() > 0
        for name, gradient in seen.gradients[0].items():
            assert gradient.isfinite().all(), name
            if name.endswith("down_proj"):
                used = gradient.flatten(1).abs().sum(1) > 0
                assert [expert for expert in range(EXPERTS) if not used[expert]] == idle, name
