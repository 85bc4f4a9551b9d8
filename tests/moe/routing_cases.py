"""A small model and batches for routing on meshes; ranks import this too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    MeshConfig,
    MoEConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.toys import QWEN3, VOCAB
from tests.support.trajectories import run_trajectory

ROWS, SEQ_LEN, STEPS = 4, 16, 2
MODEL = replace(
    QWEN3,
    num_layers=2,
    num_shared_experts=1,
    attention=AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=2, head_dim=6),
)


def routing_config(
    mesh: dict[str, int] | None = None,
    rows: int = 1,
    router: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    seed: int = 0,
    **moe: Any,
) -> Config:
    """``rows`` of one micro-batch; ``moe`` sets keys of ``MoEConfig``."""
    return Config(
        mesh=MeshConfig(**({"dp_shard": 1} | (mesh or {}))),
        model=replace(MODEL, router=RouterConfig(**(router or {}))),
        moe=MoEConfig(**({"experts": "loop"} | moe)),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(seq_len=SEQ_LEN, global_batch_size=ROWS, micro_batch_size=rows, dtype="float64", seed=seed),
    )


def routing_batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Random tokens, one document a row; row 1 ends in padding."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1), generator=generator)
    labels, doc_ids = tokens[:, 1:].clone(), torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64)
    doc_ids[1, -5:] = -1
    labels[1, -6:] = IGNORE
    size = ROWS // dp_size
    mine = slice(dp_rank * size, (dp_rank + 1) * size)
    positions = torch.arange(SEQ_LEN).expand(ROWS, SEQ_LEN)
    return StepBatch(tokens[mine, :-1], labels[mine], positions[mine], doc_ids[mine], 0, step * ROWS + dp_rank * size)


def run_routing(pool: RankPool, config: Config, **options: Any) -> Trajectory:
    """``STEPS`` steps of the configuration on its own mesh."""
    world_size = resolve_mesh(config.mesh, None).world_size
    return merge_trajectories(pool.run(run_trajectory, world_size, config, routing_batches, STEPS, **options))
