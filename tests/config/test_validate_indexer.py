"""Rules of indexers: what none computes is refused by name, with a remedy that works, before ranks start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from automoe.config.rule_engine import check_rows
from automoe.config.schema import Config, KernelsConfig, LoraConfig, MeshConfig, ParallelConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.launch.rules_adapters import adapter_rows
from tests.support.configurations import quick_config

ONE = ["mesh.pp=1", "mesh.ep=1", "mesh.dp_shard=1", "launch.device=cuda"]
SPARSE = quick_config(overrides=["model=small_dsv32", *ONE])
SHARED = quick_config(overrides=["model=small_glm_moe_dsa", *ONE])
DENSE = quick_config(overrides=["model=small_dsv3", *ONE])
WARMUP: dict[str, Any] = dict(indexer="warmup", freeze=["*"], trainable=["*.indexer.*"])


def of(config: Config, **changes: Any) -> Config:
    """``config`` with other values of attention, of training, or other sections."""
    attention = {key: changes.pop(key) for key in list(changes) if hasattr(config.model.attention, key)}
    train = {key: changes.pop(key) for key in list(changes) if hasattr(config.train, key)}
    model = replace(config.model, attention=replace(config.model.attention, **attention))
    return replace(config, model=model, train=replace(config.train, **train), **changes)


def check(config: Config) -> None:
    validate(config, None)
    check_rows(config, adapter_rows(config))


@pytest.mark.parametrize(
    ("broken", "key", "said"),
    [
        (of(SPARSE, index_topk=-1), "model.attention.index_topk", "at least 0"),
        (of(SPARSE, index_topk=0), "model.attention.index_topk", "models of family deepseek_v32 have indexers"),
        (of(DENSE, index_shared_layers=[1]), "model.attention.index_shared_layers", "no indexers"),
        (of(SPARSE, q_lora_rank=None), "model.attention.q_lora_rank", "latent"),
        (of(SPARSE, index_n_heads=0), "model.attention.index_n_heads", "needs 1 or more"),
        (of(SPARSE, index_head_dim=14), "model.attention.index_head_dim", "needs 16 or more"),
        (of(SPARSE, kind="gqa"), "model.attention.index_topk", "only the attention kinds mla and compressed"),
        (of(SHARED, index_shared_layers=[0]), "model.attention.index_shared_layers", "layers 1 to 3"),
        (of(SHARED, index_shared_layers=[4]), "model.attention.index_shared_layers", "layers 1 to 3"),
        (
            of(SHARED, mesh=MeshConfig(pp=2, dp_shard=1), parallel=ParallelConfig(layers_per_stage=[1, 3])),
            "model.attention.index_shared_layers",
            r"layers \[1\] begin a pipeline stage",
        ),
        (of(DENSE, indexer="warmup"), "train.indexer", "no indexers"),
        (of(SPARSE, indexer="warmup"), "train.freeze", "other parameters are trained"),
        (of(SPARSE, **WARMUP | {"trainable": ["*.indexer.*", "norm.weight"]}), "train.freeze", "1 other parameters"),
        (of(SPARSE, indexer="warmup", lora=LoraConfig(rank=4)), "train.freeze", "lora.rank=4"),
        (of(SPARSE, compile=True), "train.compile", "indexer with its choice"),
        *(
            (of(SPARSE, kernels=KernelsConfig(attention=kernel)), "kernels.attention", f"{kernel} has no such mask")
            for kernel in ("flash", "flex", "te")
        ),
        (
            of(SPARSE, mesh=MeshConfig(cp=2, dp_shard=1, ep=2), parallel=ParallelConfig(context="ring")),
            "parallel.context",
            "chosen keys",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_what_an_indexer_does_not_compute_is_refused(broken: Config, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check(broken)
    assert error.value.key == key


@pytest.mark.parametrize(
    "right",
    [
        SPARSE,
        SHARED,
        of(SPARSE, **WARMUP),
        of(SPARSE, index_topk=1, index_n_heads=1, index_head_dim=16),
        of(SPARSE, index_topk=1 << 20),
        of(SPARSE, kernels=KernelsConfig(attention="math")),
        of(SHARED, mesh=MeshConfig(pp=2, dp_shard=1), parallel=ParallelConfig(layers_per_stage=[2, 2])),
        of(SPARSE, mesh=MeshConfig(cp=2, tp=2, dp_shard=1, ep=2)),
        of(SPARSE, lora=LoraConfig(rank=4), trainable=["*.indexer.*"]),
    ],
)
def test_what_it_computes_is_not(right: Config) -> None:
    check(right)
