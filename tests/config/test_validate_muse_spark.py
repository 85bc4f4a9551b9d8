"""Rules of gates of the residual, experts on a latent and norms of outputs: refused by name, with a remedy, before ranks start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automoe.config.validate import validate
from automoe.errors import ConfigError
from tests.support.configurations import quick_config

MUSE = [
    "model=small_muse",
    "checkpoint.export_hf=false",
    "launch.device=cuda",
    "mesh.pp=1",
    "mesh.ep=1",
    "mesh.dp_shard=1",
]
ONE = ["launch.device=cuda", "mesh.pp=1", "mesh.ep=1", "mesh.dp_shard=1"]
OFFSET, GATES = "model.attention.full_attention_offset", "model.residual_gate_temperature"
SCALE = "model.attention.qk_scale_factor"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([*MUSE, "checkpoint.export_hf=true"], "checkpoint.export_hf", "only in a wrapper with vision and audio"),
        ([*MUSE, "train.compile=true"], "train.compile", "gates of the residual in float32"),
        ([*MUSE[:-1], "mesh.dp_shard=2", "mesh.etp=2"], "model.post_norm_eps", "normalised whole"),
        ([*MUSE[:-1], "mesh.dp_shard=64", "mesh.ep_shard=64"], "model.moe_intermediate_size", "96 % 64 = 32"),
        ([*MUSE, "model.moe_latent_size=100", "train.dtype=bfloat16"], "model.moe_latent_size", "100 % 8 = 4"),
        (
            [*MUSE[:-1], "mesh.dp_shard=64", "mesh.ep_shard=64", "model.moe_intermediate_size=128"],
            "model.moe_latent_size",
            "96 % 64 = 32",
        ),
        ([*MUSE, "model.residual_multiplier=0.5"], "model.residual_multiplier", "gates weight what a block adds"),
        ([*MUSE, f"{SCALE}=0"], SCALE, "larger than 0"),
        ([*MUSE, "model.attention.qk_norm=false"], SCALE, "follows norms"),
        ([*MUSE, "model.attention.qk_norm_over_heads=true"], SCALE, "follows norms"),
        (
            [*MUSE, "model.attention.output_gate=false"],
            "model.attention.split_output_gate",
            "no output gate to project",
        ),
        ([*MUSE, "model.router.logit_scale=0"], "model.router.logit_scale", "larger than 0"),
        ([*MUSE, "optim.algorithm=muon", "optim.qk_clip=100"], "optim.qk_clip", "undo any scale"),
        *(
            ([*MUSE, f"model.{name}={value}"], f"model.{name}", "models of family muse_spark_text have it")
            for name, value in (
                ("post_norm_eps", "null"),
                ("residual_gate_temperature", 0),
                ("moe_latent_size", 0),
                ("final_logit_softcapping", "null"),
                ("attention.qk_scale_factor", "null"),
            )
        ),
        ([*ONE, "model=small_qwen3_moe", "model.post_norm_eps=0"], "model.post_norm_eps", "a norm divides"),
        ([*ONE, "model=small_qwen3_moe", "model.moe_latent_size=-1"], "model.moe_latent_size", "0"),
        ([*ONE, "model=small_dsv4", "model.residual_gate_temperature=1"], GATES, "weight what a block adds"),
        ([*MUSE, "model.attention.clip_qkv=2.0"], "model.attention.clip_qkv", "clips before a factor"),
        ([*MUSE, f"{OFFSET}=2"], OFFSET, r"no more layers \(model.attention.full_attention_interval=2\)"),
        *(
            (
                [*ONE, "model=small_dsv3", f"model.attention.{name}"],
                f"model.attention.{name.partition('=')[0]}",
                "only attention kind gqa",
            )
            for name in (
                "output_norm=true",
                "nope_full_attention=true",
                "split_output_gate=true",
                "qk_scale_factor=2.0",
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_what_is_not_computed_is_refused(overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        validate(quick_config(overrides=overrides), None)
    assert error.value.key == key


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["mesh.tp=2", "mesh.ep=2"],
        ["mesh.cp=2", "mesh.ep=2"],
        ["mesh.pp=2", "mesh.dp_shard=2", "mesh.ep_shard=2"],
        ["model.moe_latent_size=192"],
        ["model.hidden_size=198", "mesh.dp_shard=2", "mesh.ep=2", "train.dtype=bfloat16"],
        ["parallel.recompute=full"],
        [f"{OFFSET}=1"],
    ],
)
def test_what_is_computed_is_not(more: list[str]) -> None:
    config = quick_config(overrides=[*MUSE, *more])
    validate(replace(config, launch=replace(config.launch, device="cpu")), None)
