"""The plan's shards against those that FSDP and DTensor really make, up to 1,024 ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from automoe.comm.tokens import MicroBatch
from automoe.config.mesh_shape import split_layers
from automoe.config.pipeline import stages_of_ranks
from automoe.config.validate import validate
from automoe.model.params import stage_params
from automoe.model.trainable import with_adapters
from automoe.parallel.fsdp import defer_reduction
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.plan import build_heaviest, main
from automoe.planner.plan import make_plan
from automoe.planner.step_memory import local_numel
from automoe.verify.fake_world import fake_world, local_shards
from tests.support.configurations import quick_config

SMALL = ["model=small_dsv3", "train.global_batch_size=32", "train.micro_batch_size=1", "data.document_mask=false"]


def world(*overrides: str, name: str = "config"):
    config = quick_config(name, list(overrides))
    mesh = validate(config, config.launch.num_ranks)
    return config, mesh


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["mesh.pp=1", "mesh.dp_shard=8", "mesh.ep=8"], id="dp8_ep8"),
        pytest.param(["mesh.pp=1", "mesh.dp_shard=8", "mesh.ep=2"], id="dp8_ep2_ep_shard4"),
        pytest.param(["mesh.pp=1", "mesh.dp_shard=7", "mesh.ep=1", "train.global_batch_size=28", "model.moe_intermediate_size=112", "model.hidden_size=224"], id="uneven"),
        pytest.param(["mesh.pp=1", "mesh.dp_replicate=2", "mesh.dp_shard=2", "mesh.ep=4"], id="hsdp_ep4"),
        pytest.param(["mesh.pp=2", "mesh.dp_shard=2", "mesh.cp=2", "mesh.ep=4"], id="pp2_cp2_ep4"),
        pytest.param(["mesh.pp=1", "mesh.dp_shard=2", "mesh.tp=4", "mesh.ep=8"], id="tp4_ep8_over_tp"),
        pytest.param(["mesh.pp=1", "mesh.dp_shard=2", "mesh.tp=2", "mesh.cp=2", "mesh.ep=2", "mesh.etp=2"], id="tp2_cp2_etp2"),
        pytest.param(["mesh.pp=1", "mesh.dp_shard=3", "mesh.tp=2", "mesh.ep=1", "mesh.ep_shard=6", "train.global_batch_size=24"], id="tp2_uneven"),
        pytest.param(["model=small_mixtral", "model.attention.num_heads=8", "model.attention.num_kv_heads=2", "mesh.pp=1", "mesh.dp_shard=2", "mesh.tp=4", "mesh.ep=4", "mesh.ep_replicate=2"], id="tp4_kv2_ep_replicate2"),
        pytest.param(["model=small_qwen2_moe", "model.attention.num_heads=8", "mesh.pp=1", "mesh.dp_shard=2", "mesh.tp=4", "mesh.ep=4"], id="biases_and_gate_tp4_kv2"),
        pytest.param(["model=small_glm4_moe", "mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=2"], id="biases_pp2_tp2"),
        pytest.param(["model=small_llama", "mesh.pp=1", "mesh.dp_shard=3", "mesh.tp=2", "mesh.ep=1", "train.global_batch_size=24"], id="dense_tp2_uneven"),
        pytest.param(["mesh.pp=2", "mesh.dp_shard=4", "mesh.ep=2", "parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2"], id="interleaved"),
        pytest.param(["mesh.pp=2", "mesh.dp_shard=4", "mesh.ep=2", "parallel.schedule=ZBVZeroBubble", "parallel.stages_per_rank=2"], id="down and up"),
        pytest.param(["mesh.pp=2", "mesh.dp_shard=2", "model.tie_embeddings=true"], id="tied"),
        pytest.param(["mesh.pp=2", "mesh.dp_shard=2", "train.dtype=bfloat16"], id="bfloat16"),
        pytest.param(["mesh.pp=1", "mesh.dp_shard=2", "mesh.tp=2", "mesh.cp=2", "mesh.ep=2", "mesh.etp=2", "lora.rank=4"], id="adapters_tp2_cp2_etp2"),
    ],
)  # fmt: skip
def test_every_shard_of_every_rank_is_as_planned(overrides: list[str]) -> None:
    config, mesh = world(*SMALL, "launch.num_ranks=null", "mesh.ep_shard=-1", *overrides)
    plan = make_plan(config, mesh)
    layers = split_layers(config.model.num_layers, mesh.pp * config.parallel.stages_per_rank)
    owned = stages_of_ranks(mesh.pp, config.parallel.stages_per_rank, config.parallel.schedule)
    for rank in range(mesh.world_size):
        position = mesh.coordinates(rank, "default")
        fsdp_rank = position["dp_shard"] * mesh.cp + position["cp"]
        params = [
            param
            for stage in owned[position["pp"]]
            for param in with_adapters(stage_params(config.model, layers, stage), config)
        ]
        built = local_shards(config, mesh, rank)
        size = {"float32": 4, "bfloat16": 4}[config.train.dtype]
        assert {name: num_bytes for name, (_, num_bytes) in built.items()} == {
            param.name: size * local_numel(param, mesh, fsdp_rank) for param in params
        }
        total = sum(num_bytes for _, num_bytes in built.values())
        assert total <= plan.ranks[position["pp"]].weights
        if fsdp_rank == 0:
            assert total == plan.ranks[position["pp"]].weights


@pytest.mark.parametrize("rank", [0, 128, 1023])
def test_dsv3_on_1024_ranks_stores_what_the_plan_says(rank: int) -> None:
    config, mesh = world(name="dsv3_671b")
    assert mesh.world_size == 1024
    stored = sum(num_bytes for _, num_bytes in local_shards(config, mesh, rank).values())
    assert stored == make_plan(config, mesh).ranks[mesh.coordinates(rank, "default")["pp"]].weights


def test_a_fake_world_leaves_no_process_group_and_refuses_a_second() -> None:
    with fake_world(3, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        with pytest.raises(RuntimeError, match="default process group"), fake_world(0, 2):
            pass
    assert not dist.is_initialized()


def test_a_plan_that_is_off_by_one_byte_is_noticed() -> None:
    config, mesh = world()
    plan = make_plan(config, mesh)
    assert build_heaviest(config, plan).as_planned
    off = replace(plan, ranks=[replace(rank, weights=rank.weights + 1) for rank in plan.ranks])
    assert not build_heaviest(config, off).as_planned


def test_plan_build_compares_with_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "dsv3_671b", "--build"]) == 0
    text = capsys.readouterr().out
    assert "of 1,024: " in text
    assert "bytes, as planned" in text
    assert main(["--config-name", "dsv3_671b", "--build", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["built"]["bytes"] == said["bytes_per_rank"][said["heaviest_pp_rank"]]["weights"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["step", "micro_batch"])
def test_a_deferred_step_keeps_the_weights_and_gradients_that_the_plan_counts(policy: str, dtype: str) -> None:
    """Between two micro-batches a module's registered parameters are the gathered ones, or the shards."""
    policies = [f"parallel.reshard={policy}", f"parallel.grad_sync={policy}", f"train.dtype={dtype}"]
    config, mesh = world("mesh.pp=1", "mesh.dp_shard=4", "mesh.ep=1", "mesh.ep_shard=4", *policies)
    rank = make_plan(config, mesh).heaviest
    with fake_world(0, mesh.world_size):
        parts = build_parts(config, build_meshes(mesh, torch.device("cpu")))
        materialize(parts, config, torch.device("cpu"))
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        defer_reduction(parts[0], config.parallel, last=False)
        parts[0](batch=MicroBatch(tokens, labels=tokens)).sum().backward()
        weights = sum(stored_bytes(parameter) for parameter in parts[0].parameters())
        gradients = sum(stored_bytes(p.grad) for p in parts[0].parameters() if p.grad is not None)
    assert weights == (rank.gathered_weights if policy == "step" else rank.weights)
    if policy == "micro_batch":
        assert gradients == rank.gradients
    elif dtype == "float32":  # in bfloat16 torch sums them in float32, out of sight
        assert gradients == rank.unsharded_gradients


def stored_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.itemsize
