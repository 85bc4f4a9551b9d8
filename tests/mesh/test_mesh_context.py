"""Rows cut over three and six ranks, with documents where cuts go wrong: of one token, of the whole row, of none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mesh_cases import MODELS, ROWS, VOCAB
from mesh_mappings import PARTS, RING, ULYSSES

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig, ParallelConfig, TrainConfig
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import run_trajectory

SEQ_LEN, STEPS, TOLERANCE = 24, 2, 1e-10


def model(name: str, **attention: int) -> ModelConfig:
    """Sizes that three and six divide."""
    one = MODELS[name]
    router = replace(one.router, num_groups=1, topk_groups=1) if one.router.num_groups > 1 else one.router
    sizes: dict[str, Any] = dict(hidden_size=12, num_experts=6, moe_intermediate_size=12, router=router)
    return replace(one, **sizes, attention=replace(one.attention, **attention))


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.rand(ROWS, VOCAB, generator=generator).argsort(1)[:, : SEQ_LEN + 1]
    index = torch.arange(SEQ_LEN).expand(ROWS, SEQ_LEN)
    docs = torch.zeros(ROWS, SEQ_LEN, dtype=torch.long)  # the first and the last row are one document
    docs[1] = index[1]
    docs[2] = -1
    docs[3, 1:] = 1
    docs[4, -1] = 1
    docs[5] = index[5] // 4  # borders where chunks end
    docs[6] = index[6] // 5
    docs[6, -3:] = -1
    starts = torch.zeros(ROWS, SEQ_LEN, dtype=torch.bool)
    starts[:, 1:] = docs[:, 1:] != docs[:, :-1]
    positions = index - torch.where(starts, index, 0).cummax(1).values
    labels = tokens[:, 1:].clone()
    labels[:, :-1][starts[:, 1:]] = IGNORE
    labels[docs < 0] = IGNORE
    mine = slice(dp_rank * ROWS // dp_size, (dp_rank + 1) * ROWS // dp_size)
    return StepBatch(tokens[mine, :-1], labels[mine], positions[mine], docs[mine], num_bytes=0, first_row=mine.start)


def run(ranks: RankPool, given: ModelConfig, mesh: dict[str, int], rows: int, **parallel: Any) -> Trajectory:
    config = Config(
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=given,
        moe=MoEConfig(experts="loop", seq_balance_coef=0.02, bias_update_rate=0.02),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(seq_len=SEQ_LEN, global_batch_size=ROWS, micro_batch_size=rows, dtype="float64"),
    )
    world = resolve_mesh(config.mesh, None).world_size
    return merge_trajectories(ranks.run(run_trajectory, world, config, batches, STEPS))


CASES = {
    "three ranks share a key head": (model("gpt-oss", num_heads=9, num_kv_heads=1), dict(cp=3), ULYSSES),
    "latents, tp": (model("deepseek", num_heads=6, num_kv_heads=6), dict(cp=3, tp=2, ep=6), ULYSSES | PARTS),
    "delta nets": (
        model("qwen3.5", num_heads=6, num_kv_heads=3, linear_num_key_heads=6, linear_num_value_heads=12),
        dict(cp=3, ep=3),
        {},
    ),
    "a ring of three": (model("qwen3", num_heads=6, num_kv_heads=3), dict(cp=3, ep=3), RING),
    "a ring of latents over six": (model("deepseek", num_heads=6, num_kv_heads=6), dict(cp=6, ep=6), RING | PARTS),
    "six ranks": (model("deepseek", num_heads=6, num_kv_heads=6), dict(cp=6, ep=6), ULYSSES),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_rows_of_any_documents_are_cut_over_any_number_of_ranks(ranks: RankPool, name: str) -> None:
    given, mesh, parallel = CASES[name]
    whole = run(ranks, given, {}, ROWS)
    compared = compare_trajectories(run(ranks, given, mesh, 4, **parallel), whole)
    different = [one for one in compared if not one.within(TOLERANCE)]
    assert len(compared) > 150 and not different, f"{len(different)} of {len(compared)} differ, first: {different[0]}"
