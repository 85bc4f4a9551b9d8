"""The pretraining loop with a capacity, recorded routing and its replay on another mesh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ObserveConfig,
    OptimConfig,
    TrainConfig,
)
from automoe.training.context import RunContext
from automoe.verify.pool import RankPool

CONFIG = Config(
    model=ModelConfig(
        family="qwen3_moe",
        hidden_size=16,
        num_layers=2,
        moe_intermediate_size=8,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
    ),
    train=TrainConfig(steps=3, seq_len=32, global_batch_size=4, val_every=3, val_batches=1),
    optim=OptimConfig(lr=1e-2, warmup_steps=0),
    data=DataConfig(kind="text"),
    checkpoint=CheckpointConfig(export_hf=False),
    observe=ObserveConfig(report=False),
)


def run_pretrain(config: Config) -> None:
    """The recipe on a rank of the pool."""
    from recipes.pretrain import main

    rank = dist.get_rank()
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    context = RunContext(rank, dist.get_world_size(), rank, torch.device("cpu"), run_dir)
    main(config, resolve_mesh(config.mesh, dist.get_world_size()), context)


@pytest.fixture
def pretrain(ranks: RankPool, tmp_path: Path):
    """``pretrain(name, mesh, lr, **moe)``: the records of a run's metrics.jsonl."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))

    def run(name: str, mesh: dict[str, int], lr: float = 1e-2, **moe: Any) -> list[dict[str, Any]]:
        config = replace(
            CONFIG,
            run_dir=str(tmp_path / name),
            mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
            moe=MoEConfig(**moe),
            data=replace(CONFIG.data, path=str(text)),
            optim=replace(CONFIG.optim, lr=lr),
        )
        ranks.run(run_pretrain, resolve_mesh(config.mesh, None).world_size, config)
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    return run


def test_recorded_routing_is_replayed_on_another_mesh(pretrain, tmp_path: Path) -> None:
    routing = str(tmp_path / "routing")
    recorded = pretrain("recorded", dict(dp_shard=2, ep=2), record_routing=routing)
    replayed = pretrain("replayed", dict(cp=2), lr=3e-2, replay_routing=routing)
    free = pretrain("free", {}, lr=3e-2)
    assert [r["max_share"] for r in replayed] == [r["max_share"] for r in recorded]
    assert replayed[0]["loss"] == pytest.approx(recorded[0]["loss"], rel=1e-5)
    assert free[2]["max_share"] != recorded[2]["max_share"]
    assert "val_loss" in replayed[-1], "validation rows are not replayed"


@pytest.mark.exhaustive
def test_what_is_dropped_and_the_z_loss_are_recorded(pretrain) -> None:
    runs = [
        pretrain(name, mesh, capacity_factor=1.0, drop_scope="sequence", pad_to_capacity=pad, z_loss_coef=1e-3)
        for name, mesh, pad in (("one", {}, False), ("two", dict(cp=2, ep=2), True))
    ]
    for record in runs[0] + runs[1]:
        assert all(0.01 < share < 1 for share in record["dropped_share"]) and len(record["dropped_share"]) == 2
        assert record["z_loss"] > 0
    first, other = runs[0][0], runs[1][0]
    assert other["dropped_share"] == pytest.approx(first["dropped_share"], abs=0.02)
    for key in ("loss", "grad_norm", "z_loss"):
        assert other[key] == pytest.approx(first[key], rel=1e-2)
