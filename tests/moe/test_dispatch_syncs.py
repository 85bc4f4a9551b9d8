"""How often each dispatcher waits for the host in a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from automoe.comm.tokens import StepBatch
from automoe.config.schema import (
    AttentionConfig,
    ClusterConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from automoe.verify.pool import RankPool
from tests.support.host_syncs import HostReads
from tests.support.trajectories import run_trajectory

ROWS, SEQ, LAYERS = 8, 16, 2


def config(mesh: dict[str, int], moe: dict[str, Any]) -> Config:
    return Config(
        cluster=ClusterConfig(gpus_per_node=2),
        mesh=MeshConfig(**mesh),
        model=ModelConfig(
            family="mixtral",
            vocab_size=32,
            hidden_size=16,
            num_layers=LAYERS,
            num_experts=8,
            moe_intermediate_size=8,
            attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=4, head_dim=4),
        ),
        moe=MoEConfig(experts="loop", **moe),
        train=TrainConfig(seq_len=SEQ, global_batch_size=ROWS, micro_batch_size=1, dtype="float64"),
    )


def rows(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    tokens = torch.arange(ROWS // dp_size * SEQ).view(-1, SEQ) % config.model.vocab_size
    index = torch.arange(SEQ).expand_as(tokens)
    return StepBatch(tokens, tokens, index, torch.zeros_like(tokens), 0, 0)


def reads_of_a_step(config: Config) -> int:
    with HostReads() as reads:
        run_trajectory(config, rows, 1, keep_tensors=False)
    return reads.count


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("mesh", "moe", "syncs"),
    [
        ({"dp_shard": 2}, {}, 0),
        ({"dp_shard": 2}, {"capacity_factor": 1.0, "pad_to_capacity": True}, 0),
        ({"dp_shard": 2}, {"capacity_factor": 1.0}, 1),
        ({"dp_shard": 2, "ep": 2}, {}, 1),
        ({"dp_shard": 1, "tp": 2, "ep": 2}, {}, 1),
        ({"dp_shard": 2, "ep": 2}, {"dispatcher": "allgather"}, 1),
        ({"dp_shard": 4, "ep": 4}, {"dispatcher": "hierarchical"}, 2),
        ({"dp_shard": 4, "ep": 4}, {"dispatcher": "hierarchical", "dispatch_dtype": "fp8"}, 2),
        ({"dp_shard": 2, "ep": 2}, {"dispatch_dtype": "fp8"}, 1),
        ({"dp_shard": 2, "etp": 2}, {}, 1),
        ({"dp_shard": 4, "ep": 2, "etp": 2}, {}, 2),
        ({"dp_shard": 2, "ep": 2}, {"capacity_factor": 1.0, "pad_to_capacity": True}, 0),
        ({"dp_shard": 2, "ep": 2}, {"dispatcher": "allgather", "capacity_factor": 1.0, "pad_to_capacity": True}, 0),
        ({"dp_shard": 4, "ep": 2, "etp": 2}, {"capacity_factor": 1.0, "pad_to_capacity": True}, 0),
    ],
    ids=[
        "one rank's experts",
        "padded to capacity",
        "dropping",
        "all-to-all",
        "all-to-all over tp",
        "all-gather",
        "hierarchical",
        "hierarchical, 8 bits",
        "all-to-all, 8 bits",
        "etp",
        "all-to-all and etp",
        "all-to-all, padded",
        "all-gather, padded",
        "all-to-all and etp, padded",
    ],
)
def test_a_step_syncs_only_for_sizes_that_dropless_needs(
    ranks: RankPool, mesh: dict[str, int], moe: dict[str, Any], syncs: int
) -> None:
    """``syncs`` for each layer and micro-batch; none in the backward pass, none for anything else."""
    dp = mesh["dp_shard"]
    for count in ranks.run(reads_of_a_step, dp * mesh.get("tp", 1), config(mesh, moe)):
        assert count == syncs * LAYERS * (ROWS // dp)
