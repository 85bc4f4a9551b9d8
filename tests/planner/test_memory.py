"""Bytes per rank against published figures for DeepSeek-V3, and against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automoe.config.batch import plan_batch
from automoe.config.facts import SENDS_KEPT
from automoe.config.mesh_shape import MeshShape, resolve_mesh, split_layers
from automoe.config.pipeline import pipeline_order, stages_of_ranks
from automoe.config.schema import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from automoe.model.params import SPECS, Param, count_params, stage_params
from automoe.planner.activations import TokenLoad, layer_activation_bytes
from automoe.planner.memory import BATCH_BYTES, INPUT_BYTES, plan_memory
from automoe.planner.step_memory import RankMemory, local_numel
from automoe.planner.workspace import layer_workspaces
from tests.support.configurations import quick_config

GIB = 2**30


def model_of(name: str) -> ModelConfig:
    return quick_config(name).model


def planned(config: Config) -> tuple[MeshShape, list[RankMemory]]:
    mesh = resolve_mesh(config.mesh, config.launch.num_ranks)
    return mesh, plan_memory(config, mesh, plan_batch(config, mesh))


def dsv3_pp4_vpp4_ep64() -> Config:
    """256 GPUs. 64 MoE layers instead of 61, so that every rank holds the 16 layers of the published stage."""
    return Config(
        model=replace(model_of("dsv3_671b"), num_layers=64, first_k_dense=0),
        mesh=MeshConfig(pp=4, dp_shard=64, ep=64),
        parallel=ParallelConfig(schedule="Interleaved1F1B", stages_per_rank=4),
        train=TrainConfig(seq_len=4096, global_batch_size=1024, micro_batch_size=1, dtype="bfloat16"),
    )


def test_dsv3_state_matches_the_published_estimate() -> None:
    """36.42 + 32.15 GiB: 6 bytes a parameter unsharded (bf16 weight, fp32 gradient), 12 sharded (fp32
    weight and moments), for the 16 layers of pp rank 2, without embedding and head. The published
    estimate leaves the router's weight out of the first figure; here it is counted."""
    config = dsv3_pp4_vpp4_ep64()
    # Interleaved, torch would gather three of a rank's four stages; the estimate counts them all.
    config.parallel = ParallelConfig(schedule="1F1B")
    mesh, ranks = planned(config)
    rank = ranks[2]
    assert len(rank.layers) == 16
    routers = 16 * config.model.num_experts * config.model.hidden_size
    unsharded = rank.gathered_weights + rank.unsharded_gradients - (4 + 4) * routers
    assert unsharded / GIB == pytest.approx(36.42, abs=0.005)
    assert (rank.weights + rank.moments) / GIB == pytest.approx(32.15, abs=0.005)


def test_dsv3_activations_match_the_published_estimate() -> None:
    """131.0 GiB for pp rank 2, 60 layer-micro-batches in flight, of which 26.3 are the experts' outputs. These and the
    experts' products are not kept here; gates after silu are, and keys beside the values. The router's share (10 bytes
    per expert and token there, about half of that here) is the difference."""
    config = dsv3_pp4_vpp4_ep64()
    mesh, ranks = planned(config)
    assert sum(most_in_flight(config, 2)) * 4 == 60
    load = TokenLoad.of(config, mesh, plan_batch(config, mesh))
    load = replace(load, mask_numbers=0, on_cpu=False)
    model, attention = config.model, config.model.attention
    outputs = 2 * load.expert_rows * model.hidden_size
    products = 2 * load.expert_rows * model.moe_intermediate_size
    gates = 2 * load.tokens * model.num_shared_experts * model.moe_intermediate_size
    keys = 2 * load.tokens * attention.num_heads * attention.qk_nope_head_dim
    kept = sum(layer_activation_bytes(model, 5, load).values())
    assert 60 * (kept + outputs + products - gates - keys) / GIB == pytest.approx(131.0, abs=0.3)
    assert 60 * outputs / GIB == pytest.approx(26.3, abs=0.1)


def most_in_flight(config: Config, pp_rank: int) -> list[int]:
    """Of each stage on a rank, where all of them keep the same."""
    parallel, num = config.parallel, config.train.global_batch_size // config.train.micro_batch_size
    held, most, pp = [0] * parallel.stages_per_rank, [0], config.mesh.pp
    dp = resolve_mesh(config.mesh, None).dp
    local = stages_of_ranks(pp, len(held), parallel.schedule)[pp_rank]
    for entry in pipeline_order(parallel.schedule, pp, len(held), num // dp)[pp_rank]:
        for kind, stage, _ in entry:
            held[local.index(stage)] += {"F": 1, "I": 0}.get(kind, -1)
            most = max(most, list(held), key=sum)
    return most


def test_micro_batches_in_flight() -> None:
    def in_flight(schedule: str, micro_batches: int, stages_per_rank: int = 1) -> list[int]:
        config = Config(
            model=ModelConfig(num_layers=16),
            mesh=MeshConfig(pp=4, dp_shard=1),
            parallel=ParallelConfig(schedule=schedule, stages_per_rank=stages_per_rank),
            train=TrainConfig(global_batch_size=micro_batches, micro_batch_size=1),
        )
        planned_ranks = planned(config)[1]
        assert all(
            sum(rank.micro_batches_in_flight) <= sum(most_in_flight(config, rank.pp_rank)) for rank in planned_ranks
        )
        return [sum(most_in_flight(config, rank)) for rank in range(4)]

    assert in_flight("1F1B", 16) == [4, 3, 2, 1]
    assert in_flight("1F1B", 2) == [2, 2, 2, 1]
    assert in_flight("GPipe", 16)[3] == 16
    assert in_flight("Interleaved1F1B", 16, 4)[0] / 4 == 4 * (1 + 3 / (4 * 4))  # arXiv 2205.05198, section 4.2


def test_first_shard_is_the_largest_and_the_shards_add_up() -> None:
    mesh = resolve_mesh(MeshConfig(dp_shard=4, cp=2, ep=4), None)
    for rows in (1, 7, 8, 9, 576):
        param = Param("w", (rows, 3), SPECS["mlp.router.weight"])
        local = [local_numel(param, mesh, rank) for rank in range(mesh.fsdp)]
        assert sum(local) == param.numel
        assert max(local) == local[0]
    experts = Param("experts.gate_up_proj", (8, 2, 6, 5), SPECS["mlp.experts.gate_up_proj"])
    assert local_numel(experts, mesh) * mesh.ep * mesh.ep_shard == experts.numel


def test_stages_hold_the_whole_model_once() -> None:
    model = model_of("moonlight_16b_a3b")
    layers = split_layers(model.num_layers, 4)
    stages = [stage_params(model, layers, stage) for stage in range(4)]
    assert sum(param.numel for stage in stages for param in stage) == count_params(model).total
    tied = [stage_params(replace(model, tie_embeddings=True), layers, stage) for stage in range(4)]
    assert [param.numel for param in tied[3] if param.part == "head"] == [model.vocab_size * model.hidden_size]


def one_rank(dtype: str, **parallel: str) -> Config:
    return Config(
        model=ModelConfig(),
        mesh=MeshConfig(dp_shard=1),
        train=TrainConfig(global_batch_size=4, micro_batch_size=2, dtype=dtype),
        parallel=ParallelConfig(**parallel),
    )


def one_rank_bytes(dtype: str, **parallel: str) -> tuple[int, RankMemory]:
    config = one_rank(dtype, **parallel)
    return count_params(config.model).total, planned(config)[1][0]


@pytest.mark.parametrize(
    ("dtype", "weight", "gathered", "gradient"), [("float64", 8, 0, 0), ("float32", 4, 0, 0), ("bfloat16", 4, 2, 4)]
)
def test_bytes_of_each_dtype(dtype: str, weight: int, gathered: int, gradient: int) -> None:
    total, rank = one_rank_bytes(dtype)
    assert rank.weights == weight * total
    assert rank.moments == 2 * weight * total
    routers = 4 * 8 * 256  # gathered as stored: the router multiplies in at least float32
    # One rank that multiplies by weights as they are stored has no copies of them.
    assert rank.gathered_weights == (gathered * total + (weight - gathered) * routers if gathered else 0)
    assert rank.unsharded_gradients == gradient * total


def test_without_wider_copies_weights_and_their_gradients_are_narrow() -> None:
    config = one_rank("bfloat16")
    config.optim.master_weights = "stochastic"
    total, rank = count_params(config.model).total, planned(config)[1][0]
    routers = 4 * 8 * 256
    assert rank.weights == 2 * (total - routers) + 4 * routers
    assert rank.moments == 8 * total
    assert rank.gathered_weights == 2 * (total - routers) + 4 * routers
    assert rank.unsharded_gradients == 4 * total
    config.optim.moments = "bfloat16"
    assert planned(config)[1][0].moments == 2 * rank.weights
    config.train.micro_batch_size = config.train.global_batch_size  # and nothing is left for FSDP to copy
    whole = planned(config)[1][0]
    assert whole.gathered_weights == whole.unsharded_gradients == 0
    config.optim.ema_decay = 0.999
    averaged = planned(config)[1][0]
    assert averaged.averages == 4 * total and whole.averages == 0
    assert averaged.peak - whole.peak == 4 * total


def test_policies_trade_memory_for_traffic() -> None:
    total, step = one_rank_bytes("bfloat16")
    _, freed = one_rank_bytes("bfloat16", reshard="micro_batch", grad_sync="micro_batch")
    assert freed.gathered_weights < step.gathered_weights
    assert freed.unsharded_gradients < step.unsharded_gradients == 4 * total
    # Reduced gradients live beside the unsharded ones only when they are reduced along the way.
    assert step.gradients == 0 < freed.gradients == 4 * total


def test_a_pipeline_keeps_weights_and_gradients_whatever_the_policy() -> None:
    step = Config(mesh=MeshConfig(pp=2, dp_shard=2), train=TrainConfig(dtype="bfloat16"))
    freed = replace(step, parallel=ParallelConfig(reshard="micro_batch", grad_sync="micro_batch"))
    assert planned(step)[1] == planned(freed)[1]


def test_interleaved_stages_of_a_rank_are_whole_together() -> None:
    def gathered(stages_per_rank: int) -> int:
        config = Config(
            model=ModelConfig(num_layers=24),
            mesh=MeshConfig(pp=2, dp_shard=2),
            parallel=ParallelConfig(schedule="Interleaved1F1B", stages_per_rank=stages_per_rank),
        )
        return planned(config)[1][1].gathered_weights

    assert gathered(2) == gathered(3) == gathered(4)


def test_a_pipeline_keeps_few_buffers_whatever_the_micro_batches() -> None:
    """The gradient that came in, and those on their way out: the first stage sends none, the last receives none."""
    config = Config(
        model=ModelConfig(num_layers=8),
        mesh=MeshConfig(pp=2, dp_shard=2, tp=2),
        train=TrainConfig(seq_len=64, global_batch_size=32, micro_batch_size=2, dtype="bfloat16"),
    )
    one = 2 * 2 * (64 // 2) * 256  # bytes, rows, positions of a tp rank, hidden
    assert [rank.receive_buffers for rank in planned(config)[1]] == [one, one]
    many = replace(config, train=replace(config.train, global_batch_size=128))
    assert [rank.receive_buffers for rank in planned(many)[1]] == [one, one]
    config.parallel = ParallelConfig(schedule="Interleaved1F1B", stages_per_rank=2)
    first, second = planned(config)[1]
    assert first.receive_buffers == (1 + SENDS_KEPT) * one
    assert second.receive_buffers in (2 * SENDS_KEPT * one, (1 + 2 * SENDS_KEPT) * one)
    assert first.inputs == (INPUT_BYTES + BATCH_BYTES) * 16 * 64
    alone = planned(replace(config, mesh=MeshConfig(dp_shard=4), parallel=ParallelConfig()))[1][0]
    assert alone.receive_buffers == 0


def test_a_single_micro_batch_has_no_whole_gradients_while_activations_are_whole() -> None:
    train = TrainConfig(global_batch_size=2, micro_batch_size=2, dtype="bfloat16")
    one = Config(mesh=MeshConfig(dp_shard=1), train=train)
    several = replace(one, train=replace(train, global_batch_size=8))
    (alone,), (deferred,) = planned(one)[1], planned(several)[1]
    assert alone.unsharded_gradients < 0.2 * deferred.unsharded_gradients
    assert alone.unsharded_gradients + alone.gradients < deferred.unsharded_gradients + deferred.gradients


def test_batch_arithmetic() -> None:
    config = Config(
        model=ModelConfig(num_experts=8, num_experts_per_token=2),
        mesh=MeshConfig(pp=2, dp_replicate=2, dp_shard=2, cp=2, ep=4),
        train=TrainConfig(seq_len=256, global_batch_size=32, micro_batch_size=2),
    )
    batch = plan_batch(config, resolve_mesh(config.mesh, None))
    assert batch.tokens_per_step == 32 * 256
    assert batch.rows_per_rank == 8
    assert batch.num_micro_batches == 4
    assert batch.tokens_per_micro_batch == 2 * 256 // 2
    assert batch.expert_rows_per_rank == 256 * 2
    assert batch.rows_per_expert == 256 * 4 * 2 / 8


def test_gathered_context_keeps_whole_rows_of_keys_and_values() -> None:
    config = Config(mesh=MeshConfig(dp_shard=1, cp=2), train=TrainConfig(seq_len=256, global_batch_size=2))
    mesh = resolve_mesh(config.mesh, None)
    load = TokenLoad.of(config, mesh, plan_batch(config, mesh))
    assert load.kv_tokens == 2 * load.tokens
    halves = replace(load, kv_tokens=load.tokens)
    extra = layer_activation_bytes(config.model, 0, load)["attention"]
    extra -= layer_activation_bytes(config.model, 0, halves)["attention"]
    attention = config.model.attention
    assert extra == 4 * load.tokens * 2 * attention.num_kv_heads * attention.head_dim


def test_recompute_trades_activations_for_one_workspace() -> None:
    config = Config(
        mesh=MeshConfig(pp=2, dp_shard=2, ep=2), train=TrainConfig(global_batch_size=16, micro_batch_size=2)
    )

    def first_rank(**parallel: object) -> RankMemory:
        return planned(replace(config, parallel=ParallelConfig(**parallel)))[1][0]

    kept, moe, full = first_rank(), first_rank(recompute=["moe"]), first_rank(recompute="full")
    one = first_rank(recompute="full", recompute_layers=[0])
    assert kept.recompute == 0 < moe.recompute < full.recompute
    assert kept.activations > one.activations > full.activations and moe.activations > full.activations
    # Two layers and two micro-batches in flight: each dropped what the workspace holds once.
    assert kept.micro_batches_in_flight == [2]
    assert kept.activations - one.activations == pytest.approx((kept.activations - full.activations) / 2, rel=0.02)


def test_products_that_add_to_the_sums_leave_out_a_layers_gradients() -> None:
    config = dsv3_pp4_vpp4_ep64()
    model = config.model
    most = {}
    for how in ("autograd", "fused", "delayed"):
        config.parallel = replace(config.parallel, expert_wgrad=how)
        mesh = resolve_mesh(config.mesh, None)
        load = replace(TokenLoad.of(config, mesh, plan_batch(config, mesh)), on_cpu=False)
        held = 3 * model.hidden_size * model.moe_intermediate_size * model.num_experts // mesh.ep
        most[how] = layer_workspaces(model, 1, load, frozenset(), held, 0)[1].temporaries
    assert most["autograd"] - most["fused"] == 2 * held
    # The activation, once more for each row, until its product has been added.
    assert most["delayed"] - most["fused"] == 2 * load.expert_rows * model.moe_intermediate_size
