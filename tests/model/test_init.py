"""Initial values depend on name and index alone, and are normal."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import automoe.model.init
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RouterConfig,
)
from automoe.model.init import fill_normal_, initialize, normal_at
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_decoder, build_parts, materialize
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import whole

MASK = (1 << 64) - 1


def normal_of(index: int, name: str, seed: int) -> float:
    """SplitMix64's output number ``index + 1`` from the key, and Box-Muller, in Python's own integers."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    radius = ((z >> 32) + 0.5) / 2**32
    return math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * (z & 0xFFFFFFFF) / 2**32)


@pytest.mark.parametrize("name, seed", [("layers.0.mlp.router.weight", 0), ("x", 123456789)])
def test_values_are_those_of_the_published_generator(name: str, seed: int) -> None:
    indices = [0, 1, 2, 1000, 2**31, 2**40 + 7]
    got = normal_at(torch.tensor(indices), name, seed).tolist()
    assert got == pytest.approx([normal_of(i, name, seed) for i in indices], rel=1e-12)


def test_values_are_standard_normal() -> None:
    n = 1_000_000
    x = normal_at(torch.arange(n), "embed_tokens.weight", 0)
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.std() - 1) < 4 / math.sqrt(2 * n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    for cut in (-2.0, -1.0, 0.0, 0.5, 1.5, 3.0):
        p = 0.5 * (1 + math.erf(cut / math.sqrt(2)))
        assert abs((x < cut).double().mean() - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert x.unique().numel() > 0.999 * n


@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
def test_neighbours_are_not_correlated(lag: int) -> None:
    n = 1_000_000
    x = normal_at(torch.arange(n), "w", 0)
    assert abs((x[lag:] * x[:-lag]).mean()) < 4 / math.sqrt(n - lag)
    assert abs((x[lag:].abs() * x[:-lag].abs()).mean() - 2 / math.pi) < 4 / math.sqrt(n - lag)


def test_names_and_seeds_give_independent_tensors() -> None:
    n = 100_000
    tensors = [
        normal_at(torch.arange(n), name, seed)
        for name, seed in (("layers.0.w", 0), ("layers.1.w", 0), ("layers.0.w", 1))
    ]
    for i in range(3):
        for j in range(i):
            assert abs((tensors[i] * tensors[j]).mean()) < 4 / math.sqrt(n)


def test_the_chunks_that_bound_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, in_pieces = torch.empty(13, 5, 7), torch.empty(13, 5, 7)
    fill_normal_(at_once, "w", 0.02, 3)
    monkeypatch.setattr(automoe.model.init, "_CHUNK", 80)
    fill_normal_(in_pieces, "w", 0.02, 3)
    assert torch.equal(at_once, in_pieces)
    assert at_once[2, 3, 4].item() == pytest.approx(0.02 * normal_of((2 * 5 + 3) * 7 + 4, "w", 3), rel=1e-6)


LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Replicate(), Shard(2)]),
    ((2, 2), [Shard(0), Shard(0)]),
]


def differing_shapes(sizes: tuple[int, ...], placements: list[Placement]) -> list[tuple[int, ...]]:
    mesh, differing = init_device_mesh("cpu", sizes), []
    for shape in ((8, 4, 6), (7, 4, 5), (3, 9, 2)):
        expected = torch.empty(shape)
        fill_normal_(expected, "w", 1.0, 5)
        sharded = distribute_tensor(torch.zeros(shape), mesh, placements)
        fill_normal_(sharded, "w", 1.0, 5)
        if not torch.equal(sharded.full_tensor(), expected):
            differing.append(shape)
    return differing


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sizes, placements", LAYOUTS, ids=str)
def test_a_shard_is_bitwise_its_part_of_the_whole(
    ranks: RankPool, sizes: tuple[int, ...], placements: list[Placement]
) -> None:
    """Uneven shards too: 7 rows over 4 ranks, and 3 rows, which leave one rank with nothing."""
    assert ranks.run(differing_shapes, 4, sizes, placements) == [[]] * 4


MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    num_layers=5,
    first_k_dense=1,
    intermediate_size=24,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=8,
    num_shared_experts=1,
    attention=AttentionConfig(
        kind="mla", num_heads=2, num_kv_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4,
        qk_rope_head_dim=4, v_head_dim=4,
    ),
    router=RouterConfig(score="sigmoid", expert_bias=True),
)  # fmt: skip


def materialized(config: Config) -> tuple[int, dict[str, torch.Tensor]]:
    meshes = build_meshes(resolve_mesh(config.mesh, None), torch.device("cpu"))
    parts = build_parts(config, meshes)
    materialize(parts, config, torch.device("cpu"))
    values = {name: whole(p) for part in parts.values() for name, p in part.named_parameters()}
    return dist.get_rank(), values


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "mesh, parallel",
    [
        (dict(dp_shard=4, ep=2), {}),
        (dict(dp_replicate=2, dp_shard=2, ep=4), {}),
        (dict(pp=2, dp_shard=1, cp=2, ep=2), dict(schedule="Interleaved1F1B", stages_per_rank=2)),
    ],
    ids=str,
)
def test_every_mesh_starts_from_the_same_bits(ranks: RankPool, mesh: dict, parallel: dict) -> None:
    config = Config(mesh=MeshConfig(**mesh), model=MODEL, parallel=ParallelConfig(**parallel))
    expected = build_decoder(MODEL, config.moe, torch.float32).to_empty(device="cpu")
    automoe.model.init.initialize(expected, MODEL.initializer_range, config.train.seed)
    reference = dict(expected.named_parameters())
    seen = set()
    for rank, values in ranks.run(materialized, 4, config):
        seen |= values.keys()
        for name, value in values.items():
            assert torch.equal(value, reference[name]), f"rank {rank}: {name}"
    assert seen == reference.keys()


def test_norms_start_at_one_and_matrices_at_the_given_spread() -> None:
    model = build_decoder(MODEL, Config().moe, torch.float32).to_empty(device="cpu")
    automoe.model.init.initialize(model, 0.02, 0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert bool((parameter == 1).all()), name
        else:
            assert abs(parameter.std().item() / 0.02 - 1) < 6 / math.sqrt(parameter.numel()), name
    weights: list[nn.Parameter] = list(model.parameters())
    assert len({round(float(w.detach().flatten()[0]), 9) for w in weights if w.dim() > 1}) == sum(
        w.dim() > 1 for w in weights
    )


@pytest.mark.parametrize("first", ["ones", torch.tensor([0.5, -2.0, 7.0])], ids=["word", "tensor"])
def test_a_bias_starts_as_its_module_says(first: str | torch.Tensor) -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    layers[0].first_values = {"bias": first}
    initialize(layers, 0.02, seed=0)
    expected = torch.ones(3) if isinstance(first, str) else first
    assert torch.equal(layers[0].bias, expected) and layers[1].bias.abs().max() == 0


def test_every_kind_of_parameter_starts_as_it_should() -> None:
    model = ModelConfig(
        hidden_size=16,
        vocab_size=16,
        num_layers=2,
        moe_intermediate_size=8,
        biased_experts=True,
        zero_centered_norms=True,
        initializer_range=0.3,
        router=RouterConfig(logit_bias=True),
        attention=AttentionConfig(
            num_heads=64,
            num_kv_heads=64,
            head_dim=2,
            qkv_bias=True,
            o_bias=True,
            sinks=True,
            full_attention_interval=2,
            linear_num_key_heads=50,
            linear_num_value_heads=400,
            linear_key_head_dim=2,
            linear_value_head_dim=2,
        ),
    )
    part = build_decoder(model, MoEConfig(), torch.float32)
    part.to_empty(device="cpu")
    initialize(part, model.initializer_range, seed=0)
    values = dict(part.named_parameters())
    for name, value in values.items():
        last = name.rpartition(".")[2]
        if last in ("bias", "gate_up_proj_bias", "down_proj_bias") or (
            name.endswith("norm.weight") and "attn" not in name
        ):
            assert value.abs().max() == 0, name
        elif name.endswith("linear_attn.norm.weight") or last == "dt_bias":
            assert (value == 1).all(), name
        elif last == "A_log":
            rates = value.exp()
            assert 0 < rates.min() and rates.max() < 16
            assert abs(rates.mean() - 8) < 4 * 16 / math.sqrt(12 * rates.numel())
        else:
            assert abs(value.std() / 0.3 - 1) < 4 / math.sqrt(2 * value.numel()), name
    assert {"layers.1.self_attn.sinks", "layers.0.linear_attn.A_log"} <= values.keys()
