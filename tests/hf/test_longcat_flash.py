"""LongCat-Flash: tensors as published, which the class of transformers cannot load as it is; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LongcatFlashConfig
from transformers.models.longcat_flash import modeling_longcat_flash as theirs

import automoe
from automoe.comm.tokens import MicroBatch
from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import stage_layers
from automoe.config.schema import Config, ModelConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.transformers_models import loading_class, stated_config
from automoe.model.decoder import Decoder
from automoe.model.params import count_params
from automoe.observe.flops import train_flops_per_token
from automoe.planner.calibrate import Bench, tiny
from tests.support.configurations import quick_config, quick_model
from tests.support.hf_models import save_small_hf


def test_files_have_experts_that_compute_alone_and_transformers_needs_gates_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = save_small_hf("longcat", tmp_path / "in", other_sizes={"vocab_size": 264})
    automoe.to_hf(automoe.from_hf(tmp_path / "in", dtype=torch.float32), tmp_path / "out", tokenizer="byte")
    written = load_file(tmp_path / "out" / "model.safetensors")
    count, zeros, pairs = hf.config.n_routed_experts, hf.config.zero_expert_num, hf.config.num_layers
    experts = {key.split(".experts.")[1].split(".")[0] for key in written if ".experts." in key}
    assert experts == set(map(str, range(count))) and zeros
    router = "model.layers.1.mlp.router"
    assert written[f"{router}.classifier.weight"].shape[0] == count + zeros
    assert written[f"{router}.e_score_correction_bias"].shape[0] == count + zeros
    parts = {f"{name}.{half}" for name in ("self_attn", "mlps", "input_layernorm") for half in (0, 1)}
    assert parts <= {".".join(key.split(".")[3:5]) for key in written}
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["num_layers"] == pairs and stated["zero_expert_type"] == "identity"
    config = AutoConfig.from_pretrained(tmp_path / "out")
    again = loading_class(config).from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(again(tokens).logits, hf(tokens).logits)
    monkeypatch.setattr(theirs.LongcatFlashExperts, "__init__", theirs.LongcatFlashExperts.__init__.__wrapped__)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        theirs.LongcatFlashForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)


# As published: without model_type, and with keys of its own class.
RAW: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_longcat_flash.LongcatFlashConfig"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_method": "MLA",
    "vocab_size": 131072,
    "hidden_size": 6144,
    "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048,
    "num_layers": 28,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "routed_scaling_factor": 6.0,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
    "moe_topk": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "max_position_embeddings": 131072,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def read(folder: Path, **keys: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(RAW | keys))
    return replace(model_config_from_hf(folder), hf_path=None)


@pytest.mark.parametrize(
    "keys", [{}, {"num_hidden_layers": 28}, {"num_hidden_layers": 56}, {"model_type": "longcat_flash"}]
)
def test_a_published_config_is_read_with_either_count_of_layers(keys: dict[str, Any], tmp_path: Path) -> None:
    model = read(tmp_path, **keys)
    assert (model.num_layers, model.num_experts, model.router.num_zero_experts) == (56, 512, 256)
    theirs = LongcatFlashConfig().to_dict() | {"model_type": "longcat_flash"}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    assert replace(model_config_from_hf(tmp_path), hf_path=None) == model
    written = family_of(model).write_config(model, RAW | keys)
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).num_layers == 28
    assert "auto_map" not in written and family_of(model).write_config(model)["attention_method"] == "MLA"


def test_counts_of_layers_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers=3, which is no number of pairs"):
        read(tmp_path, num_hidden_layers=3, num_layers=None)
    with pytest.raises(ConfigError, match="num_hidden_layers=30 and num_layers=28 pairs"):
        read(tmp_path, num_hidden_layers=30)


@pytest.mark.parametrize("name", ["longcat", "qwen3_moe", "dsv3"])
def test_a_file_that_names_its_class_alone_is_of_the_class_s_family(name: str, tmp_path: Path) -> None:
    save_small_hf(name, tmp_path)
    expected = model_config_from_hf(tmp_path)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    del stated["model_type"]
    path.write_text(json.dumps(stated))
    assert model_config_from_hf(tmp_path) == expected
    config = stated_config(tmp_path)  # of generate, eval and adapters' exports
    weights = loading_class(config).from_pretrained(tmp_path, config=config, output_loading_info=True)[1]
    assert not weights["missing_keys"] and not weights["unexpected_keys"]
    for classes in (["NobodysModel"], [expected.family, "AnotherModel"]):
        path.write_text(json.dumps(stated | {"architectures": classes}))
        with pytest.raises(ConfigError, match=f"has no model_type; its architectures are .*{classes[-1]}"):
            model_config_from_hf(tmp_path)


def test_the_published_sizes_have_the_published_numbers_of_parameters(tmp_path: Path) -> None:
    """560 B in all and 27 B for an average token, the embedding apart (arXiv 2509.01322): 8 experts of 12 compute."""
    model = read(tmp_path)
    count = count_params(model)
    embedding = count.by_part["embedding"]
    assert count.total / 1e9 == pytest.approx(560.7, abs=0.05)
    assert (count.active - embedding) / 1e9 == pytest.approx(27.1, abs=0.06)
    assert count.total - count.active == count.by_part["routed_experts"] * (512 - 8) // 512
    scores = 6 * model.num_layers * 64 * (192 + 128) * 4096 / 2
    matrices = 6 * (count.active - embedding - count.by_part["router"] - count.by_part["norms"])
    assert train_flops_per_token(model, 4096).causal == pytest.approx(matrices + scores, rel=1e-12)


@pytest.mark.parametrize(("capacity", "rows"), [(0.0, 512 * 4 * 16 // 24), (1.0, 16 * -(-512 * 4 // 24))])
def test_an_average_token_fills_rows_of_experts_that_compute(capacity: float, rows: int) -> None:
    """Two thirds of four choices of 512 tokens; with padding as many, rounded up for each expert."""
    config = config_with("small_longcat", f"moe.capacity_factor={capacity}", f"moe.pad_to_capacity={capacity > 0}")
    shape = validate(config, 1, "cpu")
    batch = plan_batch(config, shape)
    assert batch.tokens_per_micro_batch == 512 and batch.expert_rows_per_rank == rows
    assert batch.rows_per_expert * 16 == rows


def test_modules_for_multi_token_prediction_are_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_small_hf("longcat", tmp_path)
    file = tmp_path / "model.safetensors"
    more = {"model.mtp.layers.0.eh_proj.weight": torch.zeros(32, 64), "model.mtp.norm.weight": torch.zeros(32)}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    model = automoe.from_hf(tmp_path, dtype=torch.float32)
    assert model.config.num_layers == 4 and not model.config.num_mtp_layers


@pytest.mark.parametrize(
    ("key", "value"),
    [("mla_scale_q_lora", False), ("zero_expert_type", "drop"), ("router_bias", True), ("norm_topk_prob", True)],
)
def test_keys_that_transformers_does_not_read_are_refused_with_another_value(
    key: str, value: Any, tmp_path: Path
) -> None:
    """Of its publisher's: transformers would compute something else without a word."""
    save_small_hf("longcat", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        model_config_from_hf(tmp_path)


def config_with(preset: str = "small_longcat", *overrides: str, **model: Any) -> Config:
    config = quick_config(overrides=[f"model={preset}", "mesh.pp=1", "mesh.ep=1", "mesh.dp_shard=1", *overrides])
    router = {key: model.pop(key) for key in [*model] if hasattr(config.model.router, key)}
    attention = {key: model.pop(key) for key in [*model] if hasattr(config.model.attention, key)}
    parts = dict(router=replace(config.model.router, **router), attention=replace(config.model.attention, **attention))
    return replace(config, model=replace(config.model, **parts, **model))


@pytest.mark.parametrize(
    ("preset", "model", "key", "rule"),
    [
        ("longcat", dict(num_layers=5), "model.moe_shortcut", "layers are pairs, and there are 5"),
        ("longcat", dict(shared_intermediate_size=0), "model.moe_shortcut", "a dense FFN beside its experts"),
        ("longcat", dict(intermediate_size=128), "model.shared_intermediate_size", "one width for the dense FFNs"),
        ("longcat", dict(first_k_dense=2), "model.moe_shortcut", "layers are pairs of one stream"),
        ("longcat", dict(moe_shortcut=False), "model.moe_shortcut", "its layers are pairs"),
        ("dsv3", dict(scale_latents=True, q_lora_rank=None), "model.attention.scale_latents", "width of a latent"),
        ("qwen3_moe", dict(scale_latents=True), "model.attention.scale_latents", "width of a latent"),
        ("longcat", dict(num_zero_experts=-1), "model.router.num_zero_experts", "at least 0"),
        ("longcat", dict(num_experts_per_token=25), "model.num_experts_per_token", "more than all 24 experts"),
        ("qwen3_moe", dict(zero_expert_type="zero"), "model.router.zero_expert_type", "there are no zero experts"),
        ("dsv3", dict(num_zero_experts=4), "model.router.num_zero_experts", "in no group"),
        ("llama", dict(num_zero_experts=4), "model.router.num_zero_experts", "no layer has experts"),
        ("muse", dict(num_zero_experts=4), "model.router.num_zero_experts", "has no norm"),
        ("dsv4", dict(num_zero_experts=4), "model.router.num_zero_experts", "a table of token ids"),
    ],
)
def test_what_no_model_has_is_refused_by_name(preset: str, model: dict[str, Any], key: str, rule: str) -> None:
    export = "checkpoint.export_hf=false"
    validate(config_with(f"small_{preset}", export), 1, "cpu")
    with pytest.raises(ConfigError, match=rule) as caught:
        validate(config_with(f"small_{preset}", export, **model), 1, "cpu")
    assert caught.value.key == key


@pytest.mark.parametrize("model", [dict(num_experts_per_token=24), dict(num_experts=1)])
def test_a_token_may_choose_more_experts_than_compute(model: dict[str, Any]) -> None:
    validate(config_with("small_longcat", **model), 1, "cpu")


def test_a_gate_that_leaves_the_last_expert_out_needs_one_that_computes() -> None:
    validate(config_with("small_longcat", "moe.gate=balanced"), 1, "cpu")
    with pytest.raises(ConfigError, match="a zero expert without rows"):
        validate(config_with("small_longcat", "moe.gate=empty"), 1, "cpu")


def test_a_stage_has_whole_pairs() -> None:
    def config(*overrides: str) -> Config:
        parts = ["model=small_longcat", "mesh.ep=1", "mesh.dp_shard=1", "mesh.pp=4", "launch.num_ranks=4"]
        return quick_config(overrides=[*parts, *overrides])

    six = config("model.num_layers=12")
    assert [len(stage) for stage in stage_layers(six, validate(six, 4, "cpu"))] == [4, 4, 2, 2]
    with pytest.raises(ConfigError, match=r"holds at least 2 layers, and there are 4 stages.*num_layers to 8 or more"):
        validate(config("model.num_layers=6"), 4, "cpu")
    with pytest.raises(ConfigError, match=r"layers \[3\] begin a pipeline stage, and are the second ones of pairs"):
        validate(config("model.num_layers=8", "parallel.layers_per_stage=[3,1,2,2]"), 4, "cpu")
    with pytest.raises(ConfigError, match=r"Set parallel.layers_per_stage=\[2,2,2,2\] or null"):
        validate(config("model.num_layers=8", "parallel.layers_per_stage=[2,2,2]"), 4, "cpu")


def test_a_config_json_that_cannot_say_it_is_not_written() -> None:
    model = quick_model("small_qwen3_moe")
    model = replace(model, router=replace(model.router, num_zero_experts=2))
    pairs = replace(quick_model("small_longcat"), intermediate_size=128)
    with pytest.raises(ConfigError, match="config.json of a longcat_flash checkpoint would say 256"):
        family_of(pairs).write_config(pairs)
    with pytest.raises(ConfigError, match="num_zero_experts=2: a qwen3_moe checkpoint can only have 0"):
        family_of(model).write_config(model)


@pytest.mark.parametrize("layers", [2, 6])
def test_the_tiny_model_of_a_calibration_is_of_whole_pairs(layers: int) -> None:
    """Half of its layers have experts, and it runs."""
    config = tiny(Bench.of("cpu", 1), quick_model("small_longcat"), layers)
    part = Decoder(config.model, config.moe)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    assert [number for number, _ in part.moe_layers()] == list(range(0, layers, 2))
    assert config.model.shared_intermediate_size == config.model.intermediate_size
    tokens = torch.arange(8).view(1, 8)
    [logits] = part(tokens, batch=MicroBatch(tokens))
    assert logits.isfinite().all() and logits.std() > 0
