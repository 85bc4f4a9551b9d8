"""``config.json`` of both spellings to our configuration and back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published_configs import (
    DSV3,
    GLM45,
    GPT_OSS_20B,
    LLAMA31_8B,
    MIXTRAL_8X22B,
    PUBLISHED,
    QWEN2_57B,
    QWEN3_30B,
    QWEN3_NEXT_80B,
    UNREAD,
)

from automoe.config.schema import ModelConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import FAMILIES, family_of, model_config_from_hf
from automoe.hf.folder import write_settings
from automoe.hf.keys import FUSED
from automoe.model.params import SPECS
from tests.support.command import ROOT
from tests.support.configurations import quick_model


def write(folder: Path, hf: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def preset(name: str) -> ModelConfig:
    return quick_model(name)


@pytest.mark.one_in(3)
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
        if key not in ("rope_scaling", "rope_parameters", "num_nextn_predict_layers", "model_type", "auto_map"):
            assert written[key] == value, key
    # A family has one name of its own, and modelling code of the source's is not needed.
    assert written["model_type"] == config.family
    assert "auto_map" not in written


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_without_a_source_leaves_with_every_published_key(name: str, tmp_path: Path) -> None:
    """Servers refuse a file without some of them, or take another value for granted: with the published values."""
    config, published = preset(name), PUBLISHED[name]
    write_settings(tmp_path, config, torch.float32, "none")
    written = json.loads((tmp_path / "config.json").read_text())
    assert not (published.keys() | UNREAD.get(name, set())) - written.keys() - {"auto_map"}
    # These depend on the preset: context, modules for multi-token prediction, tokens, the 0.6B's and 32B's layers.
    depend = r"max_position|num_nextn|num_mtp|mtp_num|token_id|rope_|model_type|auto_map|max_window|^sliding_window"
    assert not {key for key in published if not re.search(depend, key) and written[key] != published[key]}


def test_transformers_5_spelling(tmp_path: Path) -> None:
    new = {key: value for key, value in DSV3.items() if key not in ("rope_theta", "rope_scaling")}
    yarn = {"rope_theta": 10000.0, "rope_type": "yarn"} | dict(DSV3["rope_scaling"])
    new |= {"rope_parameters": yarn, "num_local_experts": new.pop("n_routed_experts")}
    old = model_config_from_hf(write(tmp_path, DSV3))
    assert model_config_from_hf(write(tmp_path, new)) == old
    # Written over such a source, the old spelling must not stand next to the new one.
    assert "rope_parameters" not in family_of(old).write_config(old, new)
    qwen = {"num_local_experts": 128} | {k: v for k, v in QWEN3_30B.items() if k != "num_experts"}
    assert model_config_from_hf(write(tmp_path, qwen)).num_experts == 128


def test_rotated_share_in_both_spellings(tmp_path: Path) -> None:
    """GLM's default is half, where neither spelling says anything."""
    silent = {key: value for key, value in GLM45.items() if key not in ("partial_rotary_factor", "rope_theta")}
    for share in (0.25, 1.0):
        old = silent | {"partial_rotary_factor": share, "rope_theta": 1e6}
        new = silent | {"rope_parameters": {"partial_rotary_factor": share, "rope_theta": 1e6}}
        read = model_config_from_hf(write(tmp_path, new))
        assert read == model_config_from_hf(write(tmp_path, old))
        assert read.rope.partial_rotary_factor == share
        assert family_of(read).write_config(read, new)["partial_rotary_factor"] == share
    assert model_config_from_hf(write(tmp_path, silent)).rope.partial_rotary_factor == 0.5


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "family",
    ["dsv3", "qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss", "qwen3_next", "qwen3_5_moe"]
    + ["minimax_m2", "olmoe", "granite", "dsv2", "ernie45", "llama", "qwen3", "dsv32", "glm_moe_dsa", "dsv4"],
)
def test_presets_without_a_source_are_exportable(family: str, tmp_path: Path) -> None:
    config = preset(f"small_{family}")
    family_of(config).write_config(config)
    read = model_config_from_hf(write(tmp_path, family_of(config).write_config(config)))
    assert read.router == config.router
    assert read.rope == config.rope


@pytest.mark.parametrize(
    ("hf", "needles"),
    [
        ({"model_type": "no_such"}, ["model_type=no_such", "no native family", "newer transformers"]),
        (MIXTRAL_8X22B | {"sliding_window": 4096}, ["sliding_window=4096", "sliding_window=None"]),
        (QWEN3_30B | {"decoder_sparse_step": 2}, ["decoder_sparse_step=2", "come before all others"]),
        (QWEN3_30B | {"mlp_only_layers": [3]}, ["mlp_only_layers=[3]"]),
        (QWEN3_30B | {"attention_bias": True}, ["attention_bias=True"]),
        (QWEN3_30B | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope type linear"]),
        (DSV3 | {"scoring_func": "softmax"}, ["scoring_func=softmax", "scoring_func=sigmoid"]),
        (QWEN2_57B | {"decoder_sparse_step": 2}, ["mlp_only_layers=[] and decoder_sparse_step=2"]),
        (QWEN2_57B | {"mlp_only_layers": [27]}, ["mlp_only_layers=[27]"]),
        (QWEN2_57B | {"use_sliding_window": True}, ["=sliding_attention", "full_attention"]),
        (QWEN3_30B | {"use_sliding_window": True, "sliding_window": 8}, ["sliding_window=8", "sliding_window=None"]),
        (QWEN3_30B | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "qwen3_moe"]),
        (LLAMA31_8B | {"attention_bias": True}, ["attention_bias=True", "llama"]),
        (LLAMA31_8B | {"mlp_bias": True}, ["mlp_bias=True"]),
        (
            LLAMA31_8B | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ["LlamaConfig of transformers refuses", "low_freq_factor", "high_freq_factor"],
        ),
        (
            GPT_OSS_20B | {"layer_types": ["full_attention", "sliding_attention"] * 12},
            ["layer_types[1]=sliding_attention", "every 1 layers", "full_attention"],
        ),
        (GPT_OSS_20B | {"layer_types": ["chunked_attention"] * 24}, ["layer_types[0]=chunked_attention"]),
        (QWEN3_NEXT_80B | {"attention_bias": True}, ["attention_bias=True", "qwen3_next"]),
        (
            QWEN3_NEXT_80B | {"layer_types": ["linear_attention", "full_attention"] * 23 + ["full_attention"] * 2},
            ["layer_types[46]=full_attention", "every 2 layers", "linear_attention"],
        ),
        ([1, 2], ["it is not a JSON object"]),
        (DSV3 | {"num_hidden_layers": "61"}, ["DeepseekV3Config of transformers", "'num_hidden_layers'", "'61'"]),
        (DSV3 | {"n_routed_experts": None}, ["of transformers refuses", "'n_routed_experts'"]),
        (DSV3 | {"norm_topk_prob": 1}, ["of transformers refuses", "'norm_topk_prob'"]),
        (QWEN3_30B | {"hidden_size": "wide", "head_dim": None}, ["config.json has", "hidden_size"]),
        (QWEN3_30B | {"head_dim": None, "num_attention_heads": 0}, ["head_dim=null", "zero"]),
        (QWEN3_30B | {"mlp_only_layers": 3}, ["of transformers refuses", "'mlp_only_layers'"]),
        (DSV3 | {"rope_scaling": "yarn"}, ["of transformers refuses", "'rope_parameters'", "'yarn'"]),
        (DSV3 | {"rope_theta": "many"}, ["rotary embeddings", "many"]),
        (DSV3 | {"head_dim": 128}, ["head_dim=128", "qk_rope_head_dim=64"]),
        (DSV3 | {"is_causal": False}, ["is_causal=False"]),
        (DSV3 | {"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
        (DSV3 | {"per_layer_config": {"3": {"hidden_act": "relu"}}}, ["per_layer_config"]),
        (DSV3 | {"configuration_files": ["config.4.0.0.json"]}, ["configuration_files"]),
        (DSV3 | {"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "10000"]),
        (DSV3 | {"n_group": 0}, ["model.router.num_groups=0", "at least 1"]),
        (DSV3 | {"n_group": 7}, ["model.router.num_groups=7", "256 % 7 = 4"]),
        (DSV3 | {"rms_norm_eps": float("nan")}, ["rms_norm_eps is NaN"]),
        (
            DSV3 | {"rope_scaling": DSV3["rope_scaling"] | {"attention_factor": 0.0}},
            ["model.rope.attention_factor=0.0"],
        ),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_computed_is_refused(hf: object, needles: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.hf_path") as caught:
        model_config_from_hf(write(tmp_path, hf))
    for needle in needles:
        assert needle in str(caught.value)
    assert str(caught.value).count("model.hf_path=") == 1


def test_config_missing_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_config_from_hf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"model\.safetensors: there is no such folder"):
        model_config_from_hf(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        model_config_from_hf(tmp_path)


def test_model_that_the_family_cannot_express() -> None:
    config = preset("small_mixtral")
    config.router.score = "sigmoid"
    with pytest.raises(ConfigError, match=r"model\.router\.score=sigmoid.*mixtral.*softmax"):
        family_of(config).write_config(config)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mixtral", "attention.qkv_bias", True),
        ("qwen3_moe", "rope.partial_rotary_factor", 0.5),
        ("dsv3", "shared_expert_gate", True),
        ("llama", "first_k_dense", 3),
        ("qwen2_moe", "shared_expert_gate", False),
        ("mixtral", "attention.sinks", True),
        ("llama", "zero_centered_norms", True),
        ("qwen2_moe", "attention.linear_num_key_heads", 2),
        ("qwen3_next", "attention.output_gate", False),
        ("qwen3_next", "attention.linear_split_projections", True),
        ("qwen3_5_moe", "router.norm_topk_prob", False),
        ("qwen3_moe", "biased_experts", True),
        ("gpt_oss", "expert_activation", "swiglu"),
        ("gpt_oss", "attention.sinks", False),
        ("qwen3_moe", "attention.qk_norm_over_heads", True),
        ("minimax_m2", "attention.qk_norm_over_heads", False),
        ("minimax_m2", "attention.clip_qkv", 8.0),
        ("qwen3_moe", "embedding_multiplier", 2.0),
        ("dsv3", "residual_multiplier", 0.5),
        ("llama", "attention.multiplier", 0.5),
        ("mixtral", "logits_scaling", 2.0),
        ("granite", "final_logit_softcapping", 30.0),
        ("qwen3_moe", "hidden_act", "gelu"),
        ("dsv2", "router.norm_topk_prob", True),
        ("dsv2", "router.group_score_topk", 2),
        ("ernie45", "rope.interleaved", False),
    ],
)
def test_parts_that_a_family_does_not_have_are_not_written(family: str, key: str, value: object) -> None:
    config = preset(f"small_{family}")
    group, _, name = key.rpartition(".")
    setattr(getattr(config, group) if group else config, name, value)
    with pytest.raises(ConfigError, match=rf"model\.{key}={value}.*{config.family} checkpoint can only have"):
        family_of(config).write_config(config)


def test_heads_that_transformers_does_not_load_are_refused_before_the_run() -> None:
    config = replace(preset("small_llama"), hidden_size=100)
    with pytest.raises(ConfigError, match=r"model\.hidden_size=100.*100 % 6 = 4.*model\.hidden_size=96"):
        family_of(config).write_config(config)
    other = replace(preset("small_qwen3"), hidden_size=100)
    family_of(other).write_config(other)


def test_the_documented_table_is_that_of_the_families() -> None:
    """Every model_type and every published size, in the row of its family."""
    root = Path(__file__).parents[2]
    rows = {}
    for line in (root / "docs" / "huggingface.md").read_text().splitlines():
        cells = [re.findall(r"`(\w+)`", cell) for cell in line.split("|")]
        if len(cells) == 5 and cells[2] and (cells[3] or cells[2][0] in FAMILIES):
            rows[cells[2][0]] = (cells[2], set(cells[3]))
    assert {name: types for name, (types, _) in rows.items()} == {
        name: [name, *family.known_as] for name, family in FAMILIES.items()
    }
    presets = (path.stem for path in (root / "conf" / "model").glob("*.yaml"))
    sizes: dict[str, set[str]] = {}
    for name in presets:
        if not name.startswith("small_"):
            sizes.setdefault(preset(name).family, set()).add(name)
    assert sizes == {name: published for name, (_, published) in rows.items() if published}


def test_a_family_is_a_declaration() -> None:
    """60 lines each at most; several that share a file share its lines."""
    declared: dict[str, int] = Counter(
        module for family in FAMILIES.values() for module in _modules_that_declare(family.model_type)
    )
    assert sum(declared.values()) == len(FAMILIES)
    for file, number in declared.items():
        lines = (ROOT / "automoe" / "hf" / "families" / file).read_text().splitlines()
        assert len(lines) <= 60 * number, file


def _modules_that_declare(model_type: str) -> list[str]:
    folder = ROOT / "automoe" / "hf" / "families"
    return [path.name for path in folder.glob("*.py") if f'model_type="{model_type}"' in path.read_text()]


def test_stored_dims_have_the_letters_of_the_table_of_parameters() -> None:
    maps = [layout for family in FAMILIES.values() for layout in (family.keys, *family.keys.layouts)]
    stored = [each for keys in (*maps, FUSED, maps[0].stacked) for each in keys.rows.items() if " [E " in each[1]]
    assert len({row for _, row in stored}) > 4
    for name, row in stored:
        letters = set(row.partition(" [")[2].rstrip("]").replace("*", " ").split()) - {"2"}
        assert letters <= set(SPECS[name].shape.split()), (name, row)


def test_sections_of_positions_outlive_an_export_of_text_alone(tmp_path: Path) -> None:
    """Positions of text are alike in time, height and width; a reader with vision needs the sections."""
    sections = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    path = write(tmp_path, QWEN3_5 := PUBLISHED["qwen3_5_35b_a3b"])
    config = model_config_from_hf(path)
    stated = family_of(config).write_config(config, QWEN3_5.get("text_config", QWEN3_5))["rope_parameters"]
    assert sections.items() <= stated.items() and stated["partial_rotary_factor"] == 0.25


def test_without_a_checkpoint_families_need_no_torch() -> None:
    script = (
        "import sys; from automoe.config.compose import compose_config; from automoe.hf.families.registry import family_of; "
        "config = compose_config().model; family_of(config).write_config(config); "
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    plain = model_config_from_hf(write(tmp_path, QWEN3_30B))
    idle = {
        "hidden_act": "swish",
        "use_cache": False,
        "pad_token_id": 3,
        "torch_dtype": "bfloat16",
        "num_labels": 10**12,
    }
    idle |= {"attention_dropout": 0.0, "router_aux_loss_coef": 0.5, "auto_map": {"AutoConfig": "other.Config"}}
    idle |= {"num_hidden_layers": 48, "max_window_layers": 3, "sliding_window": 4, "partial_rotary_factor": 1.0}
    assert model_config_from_hf(write(tmp_path, QWEN3_30B | idle)) == plain
    gpt_oss = model_config_from_hf(write(tmp_path, GPT_OSS_20B))
    assert model_config_from_hf(write(tmp_path, GPT_OSS_20B | {"hidden_act": "swiglu"})) == gpt_oss


def test_a_shared_expert_of_any_width(tmp_path: Path) -> None:
    """Qwen's shared FFN, where it is not a whole number of routed experts wide, has a width of its own."""
    odd = model_config_from_hf(write(tmp_path, QWEN2_57B | {"shared_expert_intermediate_size": 20000}))
    assert (odd.num_shared_experts, odd.shared_intermediate_size, odd.shared_width) == (1, 20000, 20000)
    assert family_of(odd).write_config(odd)["shared_expert_intermediate_size"] == 20000
    even = model_config_from_hf(write(tmp_path, QWEN2_57B))
    assert (even.num_shared_experts, even.shared_intermediate_size, even.shared_width) == (8, 0, 20480)
    with pytest.raises(
        ConfigError, match=r"model\.shared_intermediate_size=64.*deepseek_v3 checkpoint can only have 0"
    ):
        family_of(preset("small_dsv3")).write_config(replace(preset("small_dsv3"), shared_intermediate_size=64))


def test_a_family_that_this_release_of_transformers_does_not_have(tmp_path: Path) -> None:
    """Its config.json says everything, or the family's declaration does; rotary embeddings are spelled as ever."""
    family = replace(FAMILIES["llama"], model_type="llama_of_tomorrow")
    read = family.read_config(LLAMA31_8B, str(tmp_path))
    assert replace(read, family="llama") == FAMILIES["llama"].read_config(LLAMA31_8B, str(tmp_path))
    with pytest.raises(ConfigError, match="has no num_hidden_layers, which a llama_of_tomorrow model needs"):
        family.read_config({k: v for k, v in LLAMA31_8B.items() if k != "num_hidden_layers"}, "")


def test_gpt_oss_without_scaling_says_so(tmp_path: Path) -> None:
    """Absent, its rotary embeddings are yarn with untruncated borders: transformers' default."""
    silent = {key: value for key, value in GPT_OSS_20B.items() if key not in ("rope_scaling", "layer_types")}
    read = model_config_from_hf(write(tmp_path, silent))
    assert read == model_config_from_hf(write(tmp_path, GPT_OSS_20B))
    assert (read.rope.scaling, read.rope.truncate) == ("yarn", False)
    plain = replace(read, rope=replace(read.rope, scaling="none"))
    written = write(tmp_path, family_of(plain).write_config(plain, GPT_OSS_20B))
    assert model_config_from_hf(written).rope.scaling == "none"
