"""What ``train.compile`` excludes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import Scope, check_rows, refused
from automoe.config.rules_kernels import COMPILE
from automoe.config.schema import Config, KernelsConfig, MeshConfig, ParallelConfig, TrainConfig
from automoe.errors import ConfigError


@pytest.mark.parametrize(
    ("choice", "named", "instead"),
    [
        (dict(parallel=ParallelConfig(context="ring")), "parallel.context=ring", "parallel.context=gather"),
        (dict(kernels=KernelsConfig(attention="te")), "kernels.attention=te", "kernels.attention=sdpa"),
        (dict(kernels=KernelsConfig(attention="flex")), "kernels.attention=flex", "kernels.attention=sdpa"),
        (dict(kernels=KernelsConfig(norm="te")), "kernels.norm=te", "kernels.norm=torch"),
        (dict(kernels=KernelsConfig(rope="triton")), "kernels.rope=triton", "kernels.rope=torch"),
        (dict(train=TrainConfig(fp8="tensorwise")), "train.fp8=tensorwise", "train.fp8=off"),
        (
            dict(parallel=ParallelConfig(recompute=["moe", "layernorm"])),
            "parallel.recompute=[moe,layernorm]",
            "parallel.recompute=[moe]",
        ),
        (
            dict(parallel=ParallelConfig(recompute="mla_up_proj")),
            "parallel.recompute=mla_up_proj",
            "parallel.recompute=[]",
        ),
        (dict(parallel=ParallelConfig(recompute=["core_attn"])), "with mesh.tp=2", "parallel.recompute=[]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_compiled_is_named(choice: dict, named: str, instead: str) -> None:
    cut_rows = resolve_mesh(MeshConfig(cp=2, tp=2), 4)
    compiled = Config(**choice)
    compiled = replace(compiled, train=replace(compiled.train, compile=True))
    with pytest.raises(ConfigError) as raised:
        check_rows(compiled, refused(Scope(compiled, cut_rows), COMPILE))
    assert raised.value.key == "train.compile" and named in str(raised.value)
    assert str(raised.value).endswith(f"Set train.compile=false, or {instead}")
    plain = Config(**choice)
    check_rows(plain, refused(Scope(plain, cut_rows), COMPILE))


def test_what_can_be_compiled() -> None:
    fine = ParallelConfig(recompute=["core_attn", "mlp", "moe", "shared_experts"])
    config = Config(train=TrainConfig(compile=True), parallel=fine)
    check_rows(config, refused(Scope(config, resolve_mesh(MeshConfig(cp=2), 2)), COMPILE))
    ring = Config(train=TrainConfig(compile=True), parallel=ParallelConfig(context="ring"))
    check_rows(ring, refused(Scope(ring, resolve_mesh(MeshConfig(), 2)), COMPILE))  # which cuts no row
