"""Rules of compressed attention: what it does not compute is refused by name, with a remedy, before ranks start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from automoe.config.schema import AttentionConfig, Config, KernelsConfig, MeshConfig, OptimConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from tests.support.configurations import quick_config

DENSE = quick_config(overrides=["model=small_dsv3", "mesh.pp=1", "mesh.ep=1", "mesh.dp_shard=1", "launch.device=cuda"])
ATTENTION = AttentionConfig(
    kind="compressed",
    num_heads=4,
    num_kv_heads=1,
    head_dim=48,
    q_lora_rank=96,
    qk_rope_head_dim=16,
    sliding_window=16,
    sinks=True,
    o_groups=2,
    o_lora_rank=32,
    index_topk=8,
    index_n_heads=4,
    index_head_dim=32,
    compress_ratios=[0, 4, 8, 4],
)


def of(mesh: MeshConfig | None = None, train: dict[str, Any] | None = None, **changes: Any) -> Config:
    """A model with compressed attention, with other values of attention, of training, or other sections."""
    attention = {key: changes.pop(key) for key in list(changes) if hasattr(ATTENTION, key)}
    model = replace(DENSE.model, attention=replace(ATTENTION, **attention))
    train_config = replace(DENSE.train, **train or {})
    return replace(DENSE, model=model, train=train_config, mesh=mesh or DENSE.mesh, **changes)


def scaled(**rope: float) -> Config:
    """The model, with other values of its rotary embedding."""
    config = of()
    return replace(config, model=replace(config.model, rope=replace(config.model.rope, **rope)))


@pytest.mark.parametrize(
    ("broken", "key", "said"),
    [
        (of(q_lora_rank=None), "model.attention.q_lora_rank", "latent"),
        *(
            (of(**{name: 0}), f"model.attention.{name}", "needs this size")
            for name in ("qk_rope_head_dim", "sliding_window", "o_groups", "o_lora_rank", "sparse_ratio")
        ),
        (of(qk_rope_head_dim=50), "model.attention.qk_rope_head_dim", "it has 48"),
        (
            of(head_dim=88, qk_rope_head_dim=30),
            "model.attention.qk_rope_head_dim",
            r"int\(88 \* \(30 / 88\)\) = 29 dims",
        ),
        (scaled(mscale=1.0), "model.rope.mscale", "attention_factor alone"),
        (scaled(mscale_all_dim=1.0), "model.rope.mscale_all_dim", "attention_factor alone"),
        (of(qk_rope_head_dim=15), "model.attention.qk_rope_head_dim", "pairs"),
        (of(compress_rope_theta=1.0), "model.attention.compress_rope_theta", "larger than 1"),
        (of(o_groups=3), "model.attention.num_heads", r"4 % 3 = 1"),
        (of(compress_ratios=[0, 4, 8]), "model.attention.compress_ratios", "3 ratios, and the model 4 layers"),
        (of(compress_ratios=[0, 4, -1, 4]), "model.attention.compress_ratios", "stands for -1 positions"),
        (of(index_topk=0), "model.attention.index_topk", "an indexer chooses entries"),
        (of(index_n_heads=0), "model.attention.index_n_heads", "needs 1 or more"),
        (of(index_head_dim=14), "model.attention.index_head_dim", "needs 16 or more"),
        (of(index_interleaved=True), "model.attention.index_interleaved", "compressed does not have it"),
        (of(index_shared_layers=[2]), "model.attention.index_shared_layers", "compressed does not have it"),
        (of(qk_norm=True), "model.attention.qk_norm", "compressed does not have it"),
        (of(full_attention_interval=2), "model.attention.full_attention_interval", "compressed does not have it"),
        (of(split_output_gate=True), "model.attention.split_output_gate", "only attention kind gqa"),
        (of(full_attention_offset=1), "model.attention.full_attention_offset", "full_attention_interval=1"),
        (of(output_gate=True), "model.attention.output_gate", "only attention kind gqa"),
        (of(mesh=MeshConfig(cp=2, dp_shard=1, ep=2)), "mesh.cp", "several cp ranks"),
        (of(mesh=MeshConfig(tp=4, dp_shard=1, ep=4)), "mesh.tp", "groups of heads"),
        (of(train={"compile": True}), "train.compile", "indexer with its choice"),
        (
            of(train={"compile": True}, index_topk=0, compress_ratios=[0, 8, 8, 8]),
            "train.compile",
            "compressed attention",
        ),
        (of(kernels=KernelsConfig(attention="math")), "kernels.attention", "products of its own"),
        (of(optim=OptimConfig(algorithm="muon", qk_clip=100.0)), "optim.qk_clip", "their value too"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_what_compressed_attention_does_not_compute_is_refused(broken: Config, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        validate(broken, None)
    assert error.value.key == key


@pytest.mark.parametrize(
    "right",
    [
        of(),
        of(mesh=MeshConfig(tp=2, dp_shard=1, ep=2)),
        of(mesh=MeshConfig(pp=2, dp_shard=1)),
        of(compress_ratios=[0, 0, 0, 0], index_topk=0, index_n_heads=0, index_head_dim=0),
        of(sinks=False),
    ],
)
def test_what_it_computes_is_not(right: Config) -> None:
    validate(right, None)


@pytest.mark.parametrize("key", ["sinks", "sliding_window"])
def test_latent_attention_has_neither_sinks_nor_a_window(key: str) -> None:
    attention = replace(DENSE.model.attention, **{key: getattr(ATTENTION, key)})
    with pytest.raises(ConfigError, match="attention kind mla does not have it") as error:
        validate(replace(DENSE, model=replace(DENSE.model, attention=attention)), None)
    assert error.value.key == f"model.attention.{key}"
