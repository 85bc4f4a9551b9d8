"""The mappings that random draws come from: all that ``validate`` accepts, and no other."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    TrainConfig,
)
from automoe.config.validate import validate
from automoe.errors import ConfigError
from tests.support.mappings import foldings, legal_meshes, with_mesh

MODEL = ModelConfig(
    vocab_size=268,  # 4 divides it, 8 does not
    hidden_size=12,
    num_layers=5,
    intermediate_size=24,
    num_experts=12,
    num_experts_per_token=2,
    moe_intermediate_size=8,
    attention=AttentionConfig(kind="gqa", num_heads=8, num_kv_heads=2, head_dim=4),
)
MLA = AttentionConfig(
    kind="mla", num_heads=4, num_kv_heads=4, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
)
INTERLEAVED = ParallelConfig(schedule="Interleaved1F1B", stages_per_rank=2)

CONFIGS = {
    "plain": dict(),
    "six heads, three of keys": dict(
        model=replace(MODEL, attention=replace(MODEL.attention, num_heads=6, num_kv_heads=3))
    ),
    "mla, dense layer, shared expert": dict(
        model=replace(MODEL, attention=MLA, first_k_dense=1, intermediate_size=20, num_shared_experts=1)
    ),
    "few micro-batches": dict(train=dict(micro_batch_size=4)),
    "odd rows": dict(train=dict(global_batch_size=6, seq_len=12)),
    "interleaved": dict(parallel=INTERLEAVED),
    "interleaved, six rows": dict(parallel=INTERLEAVED, train=dict(global_batch_size=6)),
    "gpipe": dict(parallel=ParallelConfig(schedule="GPipe"), train=dict(micro_batch_size=8)),
    "sizes for two stages": dict(parallel=ParallelConfig(layers_per_stage=[4, 1])),
    "per micro-batch": dict(parallel=ParallelConfig(reshard="micro_batch")),
}


def config(name: str, run_dir: Path) -> Config:
    parts = {"model": MODEL, "parallel": ParallelConfig(), "train": {}} | CONFIGS[name]
    sizes = dict(seq_len=16, global_batch_size=8, micro_batch_size=1) | parts["train"]
    return Config(
        run_dir=str(run_dir),
        model=parts["model"],
        moe=MoEConfig(experts="loop"),
        parallel=parts["parallel"],
        train=TrainConfig(**sizes),
        checkpoint=CheckpointConfig(export_hf=False),
    )


def accepted(config: Config, shape: MeshShape) -> bool:
    try:
        return validate(with_mesh(config, shape), None, "cpu") == shape
    except ConfigError:
        return False


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_legal_is_what_validate_accepts(tmp_path: Path, name: str, world_size: int) -> None:
    plain = config(name, tmp_path)
    legal = set(legal_meshes(world_size, plain))
    wrong = [shape for shape in foldings(world_size) if (shape in legal) != accepted(plain, shape)]
    assert not wrong, f"{len(wrong)} mappings are judged differently, first: {wrong[0]}"


@pytest.mark.parametrize(
    "axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep_replicate", "ep_shard", "ep", "etp"]
)
def test_every_axis_occurs_in_a_legal_mapping_and_in_one_that_is_not(tmp_path: Path, axis: str) -> None:
    plain = config("plain", tmp_path)
    legal = set(legal_meshes(8, plain))
    assert any(getattr(shape, axis) == 2 for shape in legal)
    if axis != "ep_replicate":  # copies of experts are never too many
        assert any(getattr(shape, axis) == 8 and shape not in legal for shape in foldings(8))


def test_foldings_are_all_pairs_of_factorisations_once() -> None:
    found = list(foldings(8))
    assert len(set(found)) == len(found)
    assert all(prod(s.sizes("default")) == prod(s.sizes("moe")) == 8 for s in found)
    # Ordered factorisations of 2^n into 4: 1, 4, 10, 20; each with each, for pp = 8, 4, 2, 1.
    assert len(found) == 1 + 4**2 + 10**2 + 20**2
