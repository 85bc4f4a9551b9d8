"""``config.json`` of both spellings to our configuration and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from automoe.config.convert import config_from_dict
from automoe.config.schema import ModelConfig
from automoe.errors import ConfigError
from automoe.hf.registry import FAMILIES, check_exportable, family_of, model_config_from_hf

CONF = Path(__file__).parents[2] / "automoe" / "conf" / "model"

# As published, before transformers 5.
MOONLIGHT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11264,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
DSV3 = MOONLIGHT | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X22B = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}
PUBLISHED = {
    "moonlight_16b_a3b": MOONLIGHT,
    "dsv3_671b": DSV3,
    "qwen3_30b_a3b": QWEN3_30B,
    "mixtral_8x22b": MIXTRAL_8X22B,
}


def write(folder: Path, hf: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def preset(name: str) -> ModelConfig:
    return config_from_dict({"model": yaml.safe_load((CONF / f"{name}.yaml").read_text())}).model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_our_preset(name: str, tmp_path: Path) -> None:
    read = model_config_from_hf(write(tmp_path, PUBLISHED[name]))
    ours = preset(name)
    assert read.hf_path == str(tmp_path)
    # What a family does not use is left at its default by both, except for these.
    head_dim = ours.attention.head_dim if ours.attention.kind == "mla" else read.attention.head_dim
    read = replace(read, hf_path=None, attention=replace(read.attention, head_dim=head_dim))
    if ours.rope.scaling == "none":
        read = replace(read, rope=replace(read.rope, original_seq_len=ours.rope.original_seq_len))
    assert read == ours


@pytest.mark.parametrize("name", PUBLISHED)
def test_written_config_reads_back(name: str, tmp_path: Path) -> None:
    config = model_config_from_hf(write(tmp_path, PUBLISHED[name]))
    written = family_of(config).write_config(config, PUBLISHED[name])
    assert model_config_from_hf(write(tmp_path, written)) == config
    for key, value in PUBLISHED[name].items():
        if key not in ("rope_scaling", "num_nextn_predict_layers"):
            assert written[key] == value, key


def test_transformers_5_spelling(tmp_path: Path) -> None:
    new = {key: value for key, value in DSV3.items() if key not in ("rope_theta", "rope_scaling")}
    yarn = {"rope_theta": 10000.0, "rope_type": "yarn"} | dict(DSV3["rope_scaling"])
    new |= {"rope_parameters": yarn, "num_local_experts": new.pop("n_routed_experts")}
    old = model_config_from_hf(write(tmp_path, DSV3))
    assert model_config_from_hf(write(tmp_path, new)) == old
    # Written over such a source, the old spelling must not stand beside the new one.
    assert "rope_parameters" not in family_of(old).write_config(old, new)
    qwen = {"num_local_experts": 128} | {k: v for k, v in QWEN3_30B.items() if k != "num_experts"}
    assert model_config_from_hf(write(tmp_path, qwen)).num_experts == 128


@pytest.mark.parametrize("family", ["small_dsv3", "small_qwen3_moe", "small_mixtral"])
def test_presets_without_a_source_are_exportable(family: str, tmp_path: Path) -> None:
    config = preset(family)
    check_exportable(config)
    read = model_config_from_hf(write(tmp_path, family_of(config).write_config(config)))
    assert read.router == config.router
    assert read.rope == config.rope


@pytest.mark.parametrize(
    ("hf", "needles"),
    [
        ({"model_type": "gemma3"}, ["model_type=gemma3", "kimi_k2", *FAMILIES]),
        (
            {k: v for k, v in MIXTRAL_8X22B.items() if k != "num_local_experts"},
            ["has no num_local_experts", "mixtral"],
        ),
        (MIXTRAL_8X22B | {"sliding_window": 4096}, ["sliding_window=4096", "sliding_window=None"]),
        (QWEN3_30B | {"decoder_sparse_step": 2}, ["decoder_sparse_step=2"]),
        (QWEN3_30B | {"mlp_only_layers": [3]}, ["mlp_only_layers=[3]"]),
        (QWEN3_30B | {"attention_bias": True}, ["attention_bias=True"]),
        (QWEN3_30B | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope type linear"]),
        (DSV3 | {"scoring_func": "softmax"}, ["scoring_func=softmax", "scoring_func=sigmoid"]),
        ([1, 2], ["not a JSON object"]),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_computed_is_refused(hf: object, needles: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.hf_path") as caught:
        model_config_from_hf(write(tmp_path, hf))
    for needle in needles:
        assert needle in str(caught.value)


def test_config_missing_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        model_config_from_hf(tmp_path)


def test_model_that_the_family_cannot_express() -> None:
    config = preset("small_mixtral")
    config.router.score = "sigmoid"
    with pytest.raises(ConfigError, match=r"model\.router\.score=sigmoid.*mixtral.*softmax"):
        check_exportable(config)


def test_reading_a_config_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, DSV3)
    script = (
        "import sys; from automoe.hf.registry import model_config_from_hf as read; "
        f"read({str(tmp_path)!r}); print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
