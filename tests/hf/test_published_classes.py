"""Models as they are published.

Transformers reads and does not write the names, keys and dtypes of DeepSeek-V4. Inkling 2 has the rows of gates and ups
in turn, and a head that is filled up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import automoe
from automoe.classes.build import class_params
from automoe.classes.family import _pieces, _View
from automoe.classes.model import TransformersModel
from automoe.config.schema import MoEConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.families.registry import family_of
from automoe.hf.read import load_hf
from tests.support.class_models import save_class, tier_config
from tests.support.configurations import quick_model
from tests.support.releases import needs

# name in the release -> name in the class, of the whole model and below a layer
WHOLE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
WHOLE |= {f"hc_head_{key}": f"model.hc_head.hc_{key}" for key in ("fn", "base", "scale")}
INDEXER = "self_attn.compressor.indexer"
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.indexer.wq_b.weight": f"{INDEXER}.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": f"{INDEXER}.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
for published, own in (("attn.compressor", "self_attn.compressor"), ("attn.indexer.compressor", INDEXER)):
    LAYER |= {f"{published}.w{key}.weight": f"{own}.{key}_proj.weight" for key in ("kv", "gate")}
    LAYER |= {f"{published}.ape": f"{own}.position_bias", f"{published}.norm.weight": f"{own}.kv_norm.weight"}
for part in ("attn", "ffn"):
    LAYER |= {f"hc_{part}_{key}": f"{part}_hc.{key}" for key in ("fn", "base", "scale")}
RATES = dict(compressed_sparse_attention=4, heavily_compressed_attention=128)


def released(theirs: Any) -> dict[str, Tensor]:
    """Return the tensors of a model of transformers under the names of the release."""
    state = theirs.state_dict()
    found = {name: state[own] for name, own in WHOLE.items()}
    for n in range(theirs.config.num_hidden_layers):
        layer = f"model.layers.{n}."
        found |= {f"layers.{n}.{name}": state[layer + own] for name, own in LAYER.items() if layer + own in state}
        gates_ups, downs = (state[f"{layer}mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
        for e, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
            gate, up = gate_up.chunk(2)
            for name, matrix in (("w1", gate), ("w2", down), ("w3", up)):
                found[f"layers.{n}.ffn.experts.{e}.{name}.weight"] = matrix
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}


@pytest.mark.parametrize("more", [{}, {"compress_rates": RATES}], ids=["tiny", "4 and 128"])
def test_an_export_is_the_release_and_transformers_computes_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    def logits(folder: Path) -> Tensor:
        kind = AutoModelForCausalLM.from_pretrained
        model, info = kind(folder, dtype=torch.float64, experts_implementation="eager", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            return model.eval()(tokens, use_cache=False).logits

    expected = released(save_class("deepseek_v4", tmp_path / "saved", **more))
    model = automoe.from_hf(tmp_path / "saved", dtype=torch.float32)
    automoe.to_hf(model, tmp_path / "out", tokenizer="byte")
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], x) for key, x in expected.items())
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    heavy = more.get("compress_rates", {}).get("heavily_compressed_attention", 8)
    # the last is of the module for multi-token prediction, which the release has and the model not
    assert config["compress_ratios"] == [heavy, 4, heavy, 4, 0] and config["num_hash_layers"] == 2
    tokens = torch.randint(300, (2, 140), generator=torch.Generator().manual_seed(2))
    alike = logits(tmp_path / "saved")
    if more:  # what the release states
        for key in ("layer_types", "mlp_layer_types", "compress_rates"):
            del config[key]
        path.write_text(json.dumps(config))
    torch.testing.assert_close(logits(tmp_path / "out"), alike, rtol=0, atol=0)
    again = automoe.from_hf(tmp_path / "out", dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), alike, rtol=0, atol=1e-5 * float(alike.abs().max()))
    for name, x in model.state_dict().items():
        assert torch.equal(x.double(), again.state_dict()[name].double()), name


def test_a_bfloat16_export_keeps_what_the_release_has_in_float32(tmp_path: Path) -> None:
    """And norms, which transformers keeps so if they are; token ids' experts are int64."""
    save_class("deepseek_v4", tmp_path / "saved")
    model = automoe.from_hf(tmp_path / "saved", dtype=torch.float32)
    automoe.to_hf(model, tmp_path / "out", tokenizer="byte", dtype="bfloat16")
    for key, x in tensors(tmp_path / "out").items():
        wide = "hc_" in key or key.endswith(("norm.weight", "attn_sink", ".ape", "gate.bias"))
        narrow = torch.int64 if key.endswith("tid2eid") else torch.bfloat16
        assert x.dtype == (torch.float32 if wide else narrow), key


def test_an_indexer_of_a_class_is_not_trained_and_the_run_says_so(tmp_path: Path) -> None:
    """Nor has it adapters, as in native families; nor has a layer whose product is of its own kind."""
    save_class("deepseek_v4", tmp_path)
    model = TransformersModel(tier_config(tmp_path), MoEConfig(experts="loop"))
    model.to_empty(device="cpu")
    load_hf(model, tmp_path)
    assert any("the loss reaches no indexer, so none is trained" in note for note in model.notes)
    model.train()(torch.arange(24).view(1, 24)).square().sum().backward()
    untouched = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert untouched and all(INDEXER in name for name in untouched if "experts" not in name)
    adapted = {param.name for param in class_params(str(tmp_path)) if param.spec.lora}
    assert "model.layers.1.self_attn.q_a_proj.weight" in adapted
    assert not [name for name in adapted if "indexer" in name or "o_a_proj" in name]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs(kind)) for kind in ("inkling2_text", "inkling2_loop_text")]
)
def test_rows_in_turn_and_rows_that_fill_up_are_read_and_written(kind: str, tmp_path: Path) -> None:
    """As transformers writes them: to the bit, and the rows that fill up are zeros."""
    source, out = tmp_path / "in", tmp_path / "out"
    save_class(kind, source)
    expected = tensors(source)
    assert any(key.endswith("w13_weight") for key in expected)
    written = automoe.to_hf(automoe.from_hf(source, dtype=torch.float32), out, tokenizer="byte")
    assert written.logits_error is not None and written.logits_error < 1e-5
    found = tensors(out)
    assert found.keys() == expected.keys()
    assert not [key for key, x in expected.items() if not torch.equal(found[key], x)]


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda x: x.view(3, 2, 4, 5).transpose(1, 2).reshape(3, 8, 5), 120),  # rows in turn
        (lambda x: torch.cat([x, x.new_zeros(2, 8, 5)]), 120),
        (lambda x: x[:, [0, 3]].flatten(0, 1), 30),
        (lambda x: x.view(3, 8, 5).permute(1, 0, 2).reshape(3, 8, 5), 0),  # a transpose under the old shape
        (lambda x: x.view(3, 2, 2, 2, 5).permute(0, 3, 2, 1, 4).reshape(3, 8, 5), 0),  # two dims in turn
        (lambda x: x.unflatten(2, (1, 5)).transpose(1, 3).reshape(3, 8, 5), 0),  # numbers, not rows
        (lambda x: torch.cat([x, x.new_zeros(3, 2, 5)], dim=1), 0),
    ],
)
def test_pieces_of_a_published_tensor_have_its_numbers(make: Callable[[Tensor], Tensor], numbers: int) -> None:
    """Or there are none. ``numbers`` is how many the pieces hold."""
    real, meta = torch.arange(1.0, 121).view(3, 8, 5), torch.empty(3, 8, 5, device="meta")
    stored = make(real)
    found = _pieces("key", make(meta.as_subclass(_View)), meta)
    filled = torch.zeros(3, 8, 5)
    for piece in found:
        assert (piece is None) == (numbers == 0)
        if piece is not None:
            assert (piece.file or piece.shape) == tuple(stored.shape)
            filled[piece.box] = piece.within(stored.reshape(piece.shape))
    assert torch.equal(filled[filled > 0], real[filled > 0]) and int((filled > 0).sum()) == numbers


def test_modules_for_multi_token_prediction_are_copied_unread(tmp_path: Path) -> None:
    """The release has one under names of its own; transformers passes over it."""
    save_class("deepseek_v4", tmp_path / "saved")
    automoe.to_hf(automoe.from_hf(tmp_path / "saved", dtype=torch.float32), tmp_path / "in", tokenizer="byte")
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    module = {"mtp.0.e_proj.weight": torch.randn(32, 32), "mtp.0.hc_head_scale": torch.randn(1)}
    save_file(tensors(tmp_path / "in") | module, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    automoe.to_hf(automoe.from_hf(tmp_path / "in", dtype=torch.float32), tmp_path / "out", tokenizer="byte")
    written = tensors(tmp_path / "out")
    assert all(torch.equal(written[name], x) for name, x in module.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_the_quantized_release_is_refused_by_name(tmp_path: Path) -> None:
    """Its codes have scales of other names, and its experts are in 4 bits."""
    save_class("deepseek_v4", tmp_path / "saved")
    automoe.to_hf(automoe.from_hf(tmp_path / "saved", dtype=torch.float32), tmp_path / "in", tokenizer="byte")
    path = tmp_path / "in" / "config.json"
    stated = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated | {"expert_dtype": "fp4"}))
    found = tensors(tmp_path / "in")
    for name in [name for name in found if ".attn.w" in name]:
        found |= {name: found[name].to(torch.float8_e4m3fn), name.replace("weight", "scale"): torch.ones(1, 1)}
    save_file(found, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"attn\.w\S+\.scale.* are scales of DeepSeek-V4's published files.*to bfloat16 first"
    ):
        automoe.from_hf(tmp_path / "in")


def test_an_export_has_the_one_key_head_that_is_read() -> None:
    config = quick_model("small_dsv4")
    family = family_of(config)
    assert family.write_config(config)["num_key_value_heads"] == 1
    with pytest.raises(ConfigError, match="num_kv_heads=4: a deepseek_v4 checkpoint can only have 1"):
        family.write_config(replace(config, attention=replace(config.attention, num_kv_heads=4)))
