"""Host syncs of each dispatcher in a training step, the stages it names, and that neither is there when unused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from automoe.config.schema import (
    AttentionConfig,
    ClusterConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from automoe.data.loader import StepBatch
from automoe.moe.dispatch.base import LocalDispatcher
from automoe.moe.dispatch.measure import STAGES, HostSyncs, StageTimer
from automoe.verify.pool import RankPool
from tests.support.trajectories import run_trajectory

ROWS, SEQ, LAYERS = 8, 16, 2
EXCHANGE = {"permute", "a2a_dispatch", "experts", "a2a_combine", "unpermute"}


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


def measured_step(config: Config) -> tuple[int, dict[str, Any]]:
    with HostSyncs() as syncs, StageTimer(torch.device("cpu")) as timer:
        run_trajectory(config, rows, 1, keep_tensors=False)
    return syncs.count, timer.times()


@pytest.mark.parametrize(
    ("mesh", "moe", "syncs", "stages"),
    [
        ({"dp_shard": 2}, {}, 0, {"permute", "experts", "unpermute"}),
        ({"dp_shard": 2}, {"capacity_factor": 1.0, "pad_to_capacity": True}, 0, {"permute", "experts", "unpermute"}),
        ({"dp_shard": 2}, {"capacity_factor": 1.0}, 1, {"permute", "experts", "unpermute"}),
        ({"dp_shard": 2, "ep": 2}, {}, 1, EXCHANGE),
        ({"dp_shard": 1, "tp": 2, "ep": 2}, {}, 1, EXCHANGE),
        (
            {"dp_shard": 2, "ep": 2},
            {"dispatcher": "allgather"},
            1,
            {"all_gather", "permute", "experts", "unpermute", "reduce_scatter"},
        ),
        ({"dp_shard": 4, "ep": 4}, {"dispatcher": "hierarchical"}, 2, EXCHANGE),
        ({"dp_shard": 2, "etp": 2}, {}, 1, {"permute", "all_gather", "experts", "reduce_scatter", "unpermute"}),
        ({"dp_shard": 4, "ep": 2, "etp": 2}, {}, 2, set(STAGES)),
        ({"dp_shard": 2, "ep": 2}, {"capacity_factor": 1.0, "pad_to_capacity": True}, 0, EXCHANGE),
        (
            {"dp_shard": 2, "ep": 2},
            {"dispatcher": "allgather", "capacity_factor": 1.0, "pad_to_capacity": True},
            0,
            {"all_gather", "permute", "experts", "unpermute", "reduce_scatter"},
        ),
        ({"dp_shard": 4, "ep": 2, "etp": 2}, {"capacity_factor": 1.0, "pad_to_capacity": True}, 0, set(STAGES)),
    ],
    ids=[
        "one rank's experts",
        "padded to capacity",
        "dropping",
        "all-to-all",
        "all-to-all over tp",
        "all-gather",
        "hierarchical",
        "etp",
        "all-to-all and etp",
        "all-to-all, padded",
        "all-gather, padded",
        "all-to-all and etp, padded",
    ],
)
def test_a_step_syncs_only_for_sizes_that_dropless_needs(
    ranks: RankPool, mesh: dict[str, int], moe: dict[str, Any], syncs: int, stages: set[str]
) -> None:
    """``syncs`` for each layer and micro-batch; none in the backward pass, none for anything else."""
    dp = mesh["dp_shard"]
    for count, times in ranks.run(measured_step, dp * mesh.get("tp", 1), config(mesh, moe)):
        assert count == syncs * LAYERS * (ROWS // dp)
        assert set(times) == stages
        assert list(times) == [name for name in STAGES if name in stages], "in the order of a forward pass"
        assert all(wall > 0 and cpu > 0 for wall, cpu in times.values())


def test_no_clock_is_read_when_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: calls.append(1) or 0.0)

    def dispatch() -> None:
        x, ids = torch.ones(4, 3), torch.tensor([[0], [1], [0], [1]])
        LocalDispatcher(2)(x, ids, torch.ones(4, 1), lambda x, idx, offsets, probs: x[idx])

    dispatch()
    assert calls == []
    with StageTimer(torch.device("cpu")):
        dispatch()
    assert len(calls) == 8, "wall and CPU, before and after permute and unpermute"


def test_counters_nest_and_end() -> None:
    ids = torch.tensor([[0], [2]])  # 2: dropped

    def dispatch() -> None:
        LocalDispatcher(2, drops=True)(torch.ones(2, 3), ids, torch.ones(2, 1), lambda x, idx, offsets, probs: x[idx])

    with HostSyncs() as outer:
        dispatch()
        with HostSyncs() as inner:
            dispatch()
        dispatch()
    dispatch()
    assert (outer.count, inner.count) == (2, 1)
