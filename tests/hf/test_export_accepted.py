"""What a run may train, its export writes: settings of a model that pass before ranks start pass the export's checks."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from config_variants import base

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.rules_model import model_rows, moe_rows
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import FAMILIES
from automoe.hf.write import to_hf
from automoe.model.init import initialize, reset_buffers
from automoe.parallel.parallelize import build_decoder
from tests.support.gpu import one_rank

KNOWN = [
    ("deepseek_v3", "num_experts", 1),
    ("deepseek_v32", "num_shared_experts", 0),
    ("glm4_moe", "num_shared_experts", 0),
    ("glm4_moe", "num_experts", 1),
    ("glm4_moe_lite", "num_shared_experts", 0),
    ("glm_moe_dsa", "num_experts", 1),
    ("deepseek_v2", "num_shared_experts", 0),
    ("longcat_flash", "num_experts_per_token", 1),
]


def model_of(family: str, key: str = "", value: Any = None) -> ModelConfig:
    model = FAMILIES[family].read_config(base(family), "x")
    model = deepcopy(replace(model, hf_path=None, num_mtp_layers=0))
    if key == "num_experts":
        model.router.num_groups = model.router.topk_groups = 1
        model.num_experts_per_token = min(model.num_experts_per_token, max(value, 1))
    group, _, name = key.rpartition(".")
    if key:
        setattr(getattr(model, group) if group else model, name, value)
    return model


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for one in fields(group):
        value = getattr(group, one.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, value


def others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({0, 1, 2, value // 2, 2 * value} - {value})
    return [0.0, 0.5, 1.5 * value, 2.0 + value] if isinstance(value, float) else []


def check(model: ModelConfig) -> None:
    """What is checked before ranks start of a run that exports."""
    alone = Config(model=model, data=DataConfig(document_mask=False))
    shape = resolve_mesh(MeshConfig(), 1)
    check_rows(alone, chain(number_rows(alone), model_rows(alone, shape), moe_rows(alone)), shape)
    FAMILIES[model.family].write_config(model)


def export(config: ModelConfig, folder: Path) -> None:
    with one_rank("cpu"):
        model = build_decoder(config, MoEConfig(experts="loop"), torch.float32).to_empty(device="cpu")
        reset_buffers(model)
        initialize(model, 0.02, 0)
        to_hf(model, folder, tokenizer="none", overwrite=True)


def test_an_initial_width_that_transformers_refuses_is_refused() -> None:
    check(model_of("llama", "initializer_range", 1.0))
    check(model_of("qwen3", "initializer_range", 2.0))
    for value in (1.5, 20.0):
        with pytest.raises(ConfigError, match="loads a llama checkpoint only with 1 or less.*export_hf=false"):
            check(model_of("llama", "initializer_range", value))


@pytest.mark.parametrize(("family", "key", "value"), KNOWN)
def test_what_transformers_would_not_load_is_refused_before_ranks_start(family: str, key: str, value: int) -> None:
    check(model_of(family, key, value + 1))
    with pytest.raises(ConfigError, match=f"{value + 1} or more, or checkpoint.export_hf=false") as error:
        check(model_of(family, key, value))
    assert error.value.key == f"model.{key}"


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [("hidden_size", 30, 28), ("attention.kv_lora_rank", 15, 14), ("attention.qk_nope_head_dim", 7, 6)],
)
def test_sizes_that_deepseek_v2_cannot_have_are_refused(key: str, value: int, fits: int) -> None:
    check(model_of("deepseek_v2", key, fits))
    with pytest.raises(ConfigError, match=rf"a multiple of {4 if fits == 28 else 2}.*={fits}, or") as error:
        check(model_of("deepseek_v2", key, value))
    assert error.value.key == f"model.{key}"


@pytest.mark.parametrize(
    ("family", "key", "value", "other"),
    [
        ("gpt_oss", "attention.qkv_bias", False, True),  # one key for both kinds of bias
        ("olmoe", "attention.o_bias", True, True),
        ("granitemoeshared", "attention.multiplier", None, 8**-0.5),
        ("qwen3_next", "attention.full_attention_interval", 4, 3),  # of two layers
    ],
)
def test_what_config_json_cannot_say_is_refused(family: str, key: str, value: Any, other: Any) -> None:
    with pytest.raises(ConfigError, match="would say") as error:
        check(model_of(family, key, value))
    assert f"={str(other).lower()}, or checkpoint.export_hf=false" in error.value.remedy


EXPORTED = [
    ("qwen3_moe", "moe_intermediate_size", 18),  # no whole 16 bytes
    ("qwen2_moe", "shared_intermediate_size", 20),
    ("deepseek_v3", "attention.num_kv_heads", 2),
    ("glm4_moe_lite", "attention.num_heads", 8),
]


@pytest.mark.parametrize(("family", "key", "value"), EXPORTED)
def test_what_transformers_computes_is_exported(family: str, key: str, value: int, tmp_path: Path) -> None:
    model = model_of(family, key, value)
    check(model)
    export(model, tmp_path / "hf")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_that_is_accepted_is_exported(family: str, tmp_path: Path) -> None:
    wrong = []
    for key, value in leaves(model_of(family)):
        for other in others(value):
            model = model_of(family, key, other)
            try:
                check(model)
            except ConfigError:
                continue
            try:
                export(model, tmp_path / "hf")
            except Exception as error:  # any end but an export is wrong
                wrong.append(f"{key}={other}: {error!r:.300}")
    assert not wrong, "\n".join(wrong)
