"""The table of parameters against the modules that are built, and against transformers' names of the same tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from automoe.config.schema import ModelConfig, MoEConfig
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.keys import hf_tensors
from automoe.hf.wrapper import names_in_class
from automoe.model.linear import Linear
from automoe.model.params import EXPERT_SPECS, PARTS, SPECS, find_spec, model_params
from automoe.moe.experts import GroupedExperts
from automoe.parallel.parallelize import build_decoder
from tests.support.configurations import quick_model
from tests.support.hf_models import SMALL_MODELS, small_hf_model

MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
LAYERS = 6


def few_layers(name: str) -> ModelConfig:
    """Every kind of layer that the configuration has, in few of them."""
    model = quick_model(name)
    if model.first_k_dense == model.num_layers:
        return replace(model, num_layers=LAYERS, first_k_dense=LAYERS)
    ratios = (2 * model.attention.compress_ratios)[:LAYERS]
    model = replace(model, attention=replace(model.attention, compress_ratios=ratios))
    return replace(model, num_layers=model.first_k_dense + LAYERS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_buffers_are_those_of_the_modules(name: str) -> None:
    model = few_layers(name)
    built = build_decoder(model, MoEConfig(), torch.float32)
    assert {param.name: param.shape for param in model_params(model)} == {
        name: tuple(parameter.shape) for name, parameter in built.named_parameters()
    }
    with_buffers = {param.name for param in model_params(model, buffers=True)} - {p.name for p in model_params(model)}
    assert with_buffers == {name for name, _ in built.named_buffers() if name.endswith((".expert_bias", ".tid2eid"))}


def test_a_bias_of_queries_has_the_rows_of_their_gate() -> None:
    model = few_layers("small_qwen3_next")
    model = replace(model, attention=replace(model.attention, qkv_bias=True))
    built = build_decoder(model, MoEConfig(), torch.float32).state_dict()
    shapes = {param.name: param.shape for param in model_params(model) if param.name.endswith("q_proj.bias")}
    assert shapes and shapes == {name: tuple(built[name].shape) for name in shapes}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_rows_agree_with_the_modules_that_own_the_parameters(name: str) -> None:
    model = few_layers(name)
    built = build_decoder(model, MoEConfig(), torch.float32)
    heads = model.attention.num_heads
    for param in model_params(model):
        spec, owner = param.spec, built.get_submodule(param.name.rpartition(".")[0])
        found = find_spec(param.name)  # by name alone: both kinds of attention have an o_proj
        assert found is not None
        assert replace(found, shape="", when="") == replace(spec, shape="", when="")
        assert spec.part in PARTS
        # Adapters and 8 bits are for Linear and for the experts' backends, which nothing else has.
        assert spec.lora is None or isinstance(owner, Linear | GroupedExperts)
        assert spec.fp8 == (spec.lora is not None)
        assert all(dim is None or dim < len(param.shape) for dim in (spec.tp, spec.etp, spec.fsdp))
        assert spec.decays == (len(param.shape) > 1 and not param.name.endswith("_bias"))
        assert param.expert == isinstance(owner, GroupedExperts)
        if spec.tp is not None and param.part == "attention" and model.attention.kind == "gqa":
            per_head = model.attention.num_kv_heads if param.kv_heads else heads
            if "linear_attn" not in param.name:
                assert param.shape[spec.tp] % per_head == 0


@pytest.mark.exhaustive
def test_every_row_is_a_parameter_of_some_configuration() -> None:
    used = {param.spec.name for name in MODELS for param in model_params(few_layers(name), buffers=True)}
    assert used == {name for name in SPECS if ".lora." not in name}
    assert GroupedExperts.WIDTH_DIMS.keys() == GroupedExperts.ROW_DIMS.keys() == EXPERT_SPECS.keys()


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_keys_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = small_hf_model(name)
    theirs.config.save_pretrained(tmp_path)
    config = model_config_from_hf(tmp_path)
    plain = names_in_class(theirs).plain
    state = {name: tuple(one.shape) for key, one in theirs.state_dict().items() if (name := plain(key)) is not None}
    if config.tie_embeddings:
        state.pop("lm_head.weight", None)
    assert hf_tensors(config, family_of(config).keys.in_memory) == state
