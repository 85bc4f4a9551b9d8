"""Rules of ``train.fp8``: what has no 8-bit products, and which cuts fall inside a block."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import Scope, check_rows, refused
from automoe.config.rules_kernels import COMPILE, fp8_rows
from automoe.config.schema import AttentionConfig, Config, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from automoe.errors import ConfigError
from automoe.planner.views.plan_view import print_plan
from automoe.verify.run import passes

MLA = AttentionConfig(
    kind="mla", num_heads=8, num_kv_heads=8, kv_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
GQA = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=128)
MODEL = ModelConfig(
    hidden_size=512,
    first_k_dense=1,
    intermediate_size=1024,
    moe_intermediate_size=512,
    num_shared_experts=2,
    attention=MLA,
)
MODES = ("tensorwise", "delayed", "blockwise")


def check(mode: str, mesh: dict[str, int] | None = None, device: str = "cuda", **changes: object) -> None:
    train = TrainConfig(fp8=mode, dtype=changes.pop("dtype", "bfloat16"))  # type: ignore[arg-type]
    filled = bool(changes.pop("pad_to_capacity", False))
    moe = MoEConfig(experts=changes.pop("experts", "grouped_mm"), pad_to_capacity=filled)  # type: ignore[arg-type]
    config = Config(
        train=train,
        moe=moe,
        model=replace(MODEL, **changes),  # type: ignore[arg-type]
        mesh=MeshConfig(**({"dp_shard": 1} | (mesh or {}))),
    )
    shape = resolve_mesh(config.mesh, None)
    check_rows(config, fp8_rows(config, shape, device), shape)


@pytest.mark.parametrize("mode", MODES)
def test_what_fills_experts_up_is_in_no_scale_of_all_tokens(mode: str) -> None:
    if mode == "blockwise":
        check(mode, pad_to_capacity=True)
        return
    with pytest.raises(ConfigError, match=f"first token of each rank.*{mode}"):
        check(mode, pad_to_capacity=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "etp": 2}, {"tp": 4, "ep": 4}, {"dp_shard": 4, "ep": 2}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_meshes_that_cut_where_blocks_meet(mode: str, mesh: dict[str, int], dtype: str) -> None:
    check(mode, mesh=mesh, dtype=dtype)
    check(mode, mesh=mesh, dtype=dtype, attention=GQA)


@pytest.mark.parametrize(
    "mesh, changes, said",
    [
        ({"tp": 2}, dict(intermediate_size=1152), "the dense FFN .*1152 / 2 = 576, 576 % 128 = 64.*mesh.tp=1"),
        ({"tp": 4}, dict(intermediate_size=1280), "the dense FFN .*1280 / 4 = 320, 320 % 128 = 64.*mesh.tp=2"),
        ({"tp": 8}, dict(num_shared_experts=1), "the shared experts .*512 / 8 = 64.*mesh.tp=4"),
        ({"tp": 8}, {}, r"queries \(num_heads.*1536 / 8 = 192, 192 % 128 = 64.*mesh.tp=4"),
        (
            {"tp": 8},
            dict(attention=replace(MLA, qk_rope_head_dim=128, v_head_dim=64)),
            r"keys and values .*1536 / 8 = 192, 192 % 128 = 64.*mesh.tp=4",
        ),
        (
            {"tp": 2},
            dict(attention=replace(GQA, num_kv_heads=1, head_dim=192)),
            r"keys and values .*192.*192 % 128 = 64.*mesh.tp=1",
        ),
        (
            {"tp": 2},
            dict(
                attention=replace(
                    GQA, full_attention_interval=4, linear_num_key_heads=4, linear_num_value_heads=4,
                    linear_key_head_dim=64, linear_value_head_dim=32,
                )
            ),
            r"a delta net's .*/ 2 = ",
        ),
        ({"dp_shard": 1, "etp": 8, "tp": 8}, dict(moe_intermediate_size=768), r"128\*etp = 128\*8 = 1024 does not divide 768 .768 % 1024.*mesh.etp=2"),
        ({}, dict(moe_intermediate_size=720), r"128\*etp = 128\*1 = 128 does not divide 720 .720 % 128 = 80"),
    ],
)  # fmt: skip
def test_cuts_inside_a_block_are_refused_with_their_numbers(
    mesh: dict[str, int], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        check("blockwise", mesh=mesh, **changes)
    if "moe_intermediate_size" not in changes:
        check("tensorwise", mesh=mesh, **changes)


@pytest.mark.parametrize("mode", MODES)
def test_what_has_no_8_bit_products(mode: str) -> None:
    with pytest.raises(ConfigError, match="train.dtype=float64"):
        check(mode, dtype="float64")
    check(mode, dtype="float64", device="cpu")  # emulated
    for backend in ("loop", "triton"):
        with pytest.raises(ConfigError, match="Set moe.experts=grouped_mm, or train.fp8=off"):
            check(mode, experts=backend)
        check(mode, experts=backend, first_k_dense=MODEL.num_layers)  # no experts to multiply
    with pytest.raises(ConfigError, match="rows of a multiple of 16 bytes: 16 does not divide 520 .520 % 16 = 8"):
        check(mode, hidden_size=520)
    check("off", dtype="float64", experts="loop", hidden_size=520)


@pytest.mark.parametrize("mode", MODES)
def test_these_products_are_not_compiled(mode: str) -> None:
    config = Config(mesh=MeshConfig(dp_shard=1), train=TrainConfig(fp8=mode, compile=True))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"the products of train.fp8={mode}"):
        check_rows(config, refused(Scope(config, resolve_mesh(config.mesh, None)), COMPILE))


@pytest.mark.parametrize("mode", MODES)
def test_verify_proves_the_mesh_without_8_bits_then_the_codes_and_then_runs_what_is_configured(mode: str) -> None:
    config = Config(
        mesh=MeshConfig(dp_shard=1),
        moe=MoEConfig(experts="grouped_mm"),
        train=TrainConfig(fp8=mode, dtype="bfloat16"),  # type: ignore[arg-type]
    )
    said = [(each.train.dtype, each.train.fp8, each.moe.experts) for each in passes(config)]
    assert said == [("float64", "off", "loop"), ("float64", mode, "grouped_mm"), ("bfloat16", mode, "grouped_mm")]


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_the_plan_says_what_is_in_8_bits_and_what_mfu_means_then(mode: str) -> None:
    config = Config(mesh=MeshConfig(dp_shard=1), train=TrainConfig(fp8=mode))  # type: ignore[arg-type]
    text = StringIO()
    print_plan(config, resolve_mesh(config.mesh, None), Console(file=text))
    said = " ".join(text.getvalue().split())
    assert (f"{mode} products, emulated in float32 on a CPU; MFU is of the bfloat16 peak" in said) == (mode != "off")
