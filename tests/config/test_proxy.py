"""The stand-in for a configuration that is too large: small, valid, of the same structure, and open about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automoe.config.compose import list_options
from automoe.config.facts import BLOCK
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.data.tokenizer import BYTE_VOCAB_SIZE
from automoe.model.params import count_params
from automoe.verify.proxy import list_cuts, make_proxy
from tests.support.configurations import quick_config


def proxy_of(config: Config) -> Config:
    shape = validate(config, config.launch.num_ranks, "cuda")
    proxy, small = make_proxy(config, shape, BYTE_VOCAB_SIZE)
    assert validate(proxy, None, "cuda") == small == resolve_mesh(proxy.mesh, None)
    return proxy


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", list_options())
def test_every_primary_has_a_valid_proxy_of_the_same_structure(name: str) -> None:
    config = quick_config(name, ["launch.num_ranks=4"])
    proxy = proxy_of(config)
    assert count_params(proxy.model).total < 1_000_000
    assert proxy.train.seq_len * proxy.train.global_batch_size <= 64 * 32
    full, small = config.model, proxy.model
    assert (small.first_k_dense > 0) == (full.first_k_dense > 0)
    assert (small.num_shared_experts > 0) == (full.num_shared_experts > 0)
    assert small.attention.kind == full.attention.kind
    assert (small.attention.full_attention_interval > 1) == (full.attention.full_attention_interval > 1)
    assert (0 < small.attention.sliding_window < proxy.train.seq_len) == (full.attention.sliding_window > 0)
    assert (small.attention.num_kv_heads == small.attention.num_heads) == (
        full.attention.num_kv_heads == full.attention.num_heads
    )
    assert (small.attention.q_lora_rank is None) == (full.attention.q_lora_rank is None)
    for of in (full, small):
        assert (of.router.topk_groups < of.router.num_groups) == (full.router.topk_groups < full.router.num_groups)
    assert small.rope == full.rope and small.router.score == full.router.score
    assert (proxy.moe, proxy.train.dtype, proxy.train.seed) == (config.moe, config.train.dtype, config.train.seed)


def test_every_axis_is_cut_to_two_and_none_is_lost() -> None:
    proxy = proxy_of(quick_config("dsv3_671b", ["mesh.tp=2", "mesh.cp=4", "mesh.dp_shard=8"]))
    mesh = proxy.mesh
    assert (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp) == (2, 1, 2, 2, 2)
    assert (mesh.ep, mesh.ep_shard, proxy.parallel.stages_per_rank) == (2, 4, 2)


def test_uneven_stages_stay_uneven() -> None:
    overrides = [
        "mesh.pp=4",
        "mesh.ep=1",
        "launch.num_ranks=4",
        "model.num_layers=12",
        "parallel.layers_per_stage=[5,3,2,2]",
    ]
    proxy = proxy_of(quick_config("config", overrides))
    assert proxy.parallel.layers_per_stage == [3, 1] and proxy.model.num_layers == 4


@pytest.mark.parametrize(
    ("layout", "cut"),
    [("Et*4|t*2|t|t|m|m||L", "Etttt|tm|m|L"), ("Et|t|t|t|t|t|ttm|mL", "Etttt|tm|m|L"), ("Et|t|t|t|t|t|t|tmmL", None)],
)
def test_modules_away_from_the_head_stay_away(layout: str, cut: str | None) -> None:
    overrides = ["model=small_dsv3", "model.num_layers=8", "model.num_mtp_layers=2", "mesh.pp=4", "mesh.ep=1"]
    overrides += ["launch.num_ranks=4", "parallel.schedule=Interleaved1F1B", f"parallel.layout='{layout}'"]
    proxy = proxy_of(quick_config("config", overrides))
    assert proxy.parallel.layout == cut


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.pp=3", "parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2", "model.num_layers=13",
         "train.global_batch_size=6", "mesh.ep=1", "launch.num_ranks=3"],
        ["mesh.pp=1", "mesh.ep=3", "launch.num_ranks=3", "model.num_experts=9", "model.router.num_groups=3",
         "train.global_batch_size=12", "model.hidden_size=195", "moe.experts=loop"],
        ["mesh.pp=1", "mesh.ep=5", "launch.num_ranks=5", "model.num_experts=40", "model.router.num_groups=5",
         "model.router.topk_groups=3", "train.global_batch_size=10"],
    ],
    ids=["rounds of three micro-batches", "nine experts", "five groups"],
)  # fmt: skip
def test_odd_sizes_still_give_a_valid_proxy(overrides: list[str]) -> None:
    proxy_of(quick_config("config", overrides))


def test_cuts_are_listed_by_key() -> None:
    config = quick_config("qwen3_30b_a3b")
    cuts = {key: (before, after) for key, before, after in list_cuts(config, proxy_of(config))}
    assert cuts["mesh.ep"] == (8, 2) and cuts["model.num_experts"] == (128, 16)
    assert "model.rope.theta" not in cuts and "train.dtype" not in cuts
    assert list_cuts(config, replace(config)) == []


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("dsv3_671b", ["mesh=steady_dsv3_671b", "mesh.tp=2"]),
        ("qwen3_235b_a22b", ["mesh.tp=4"]),
        ("qwen3_next_80b_a3b", ["mesh.tp=2"]),
        ("mixtral_8x22b", ["mesh.etp=2"]),
        ("llama3_8b", ["mesh.tp=8"]),
    ],
)
def test_blocks_of_scales_meet_in_every_width_that_the_mesh_cuts(name: str, mesh: list[str]) -> None:
    """``proxy_of`` validates that no cut falls inside a block."""
    proxy = proxy_of(quick_config(name, [*mesh, "train.fp8=blockwise", "launch.num_ranks=4"]))
    assert proxy.train.fp8 == "blockwise" and proxy.model.hidden_size == 2 * BLOCK
    dense = proxy.model.first_k_dense == proxy.model.num_layers
    assert (proxy.model.intermediate_size if dense else proxy.model.moe_intermediate_size) == 2 * BLOCK
    assert count_params(proxy.model).total < 20_000_000


@pytest.mark.parametrize("overrides", [[], ["mesh.pp=2"], ["mesh.pp=2", "parallel.layers_per_stage=[40,16]"]])
def test_pairs_stay_pairs_with_dense_ffns_of_one_width(overrides: list[str]) -> None:
    full = ["model=small_longcat", "model.num_layers=56", "mesh.ep=1", "mesh.dp_shard=1", "mesh.pp=1"]
    proxy = proxy_of(quick_config(overrides=[*full, *overrides])).model
    assert proxy.moe_shortcut and proxy.num_layers % 2 == 0
    assert proxy.intermediate_size == proxy.shared_intermediate_size == 96
    assert 0 < proxy.router.num_zero_experts < proxy.num_experts
