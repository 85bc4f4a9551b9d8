"""Variants of a small ``config.json``, and what becomes of each: what the walk over every field is made of."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from automoe.config.schema import MoEConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import FAMILIES, family_of, model_config_from_hf
from automoe.hf.keys import hf_tensors
from automoe.hf.transformers_models import loading_class
from automoe.hf.wrapper import names_in_class
from automoe.parallel.parallelize import build_decoder
from tests.support.hf_models import as_our_tensor, in_wrapper
from tests.support.releases import lacks, skip_without

Variant = dict[str, Any]
ABSENT = object()
TOLERANCE = 2e-5
MAX_PARAMS = 1_000_000  # larger ones, of a size that is absent, are compared by the names and shapes of their tensors
SEQ = 24

# Every number is another one than the default of the class.
_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
_GROUPED = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.5,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}
_INDEXER = {"index_topk": 5, "index_n_heads": 3, "index_head_dim": 12, "first_k_dense_replace": 1}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}
BASES: dict[str, Variant] = {
    "deepseek_v3": _GROUPED | _MLA,
    "deepseek_v32": _GROUPED | _MLA | _INDEXER,
    "glm_moe_dsa": _GROUPED | _MLA | _INDEXER,
    "qwen3_moe": _EXPERTS | {"head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32, "max_window_layers": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "glm4_moe": _GROUPED | {"head_dim": 16, "use_qk_norm": True},
    "glm4_moe_lite": {key: value for key, value in (_GROUPED | _MLA).items() if key != "first_k_dense_replace"},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 5},
    "qwen3_next": _EXPERTS | _LINEAR | {"head_dim": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": _EXPERTS | _LINEAR | {"head_dim": 16, "shared_expert_intermediate_size": 16},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3} | _MULTIPLIERS,
    "granitemoeshared": {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 12}
    | _MULTIPLIERS,
    "deepseek_v2": _GROUPED | _MLA | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 16}
    | {"moe_layer_start_index": 1, "tie_word_embeddings": False},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 12,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "o_groups": 2,
        "o_lora_rank": 6,
        "index_n_heads": 3,
        "index_head_dim": 12,
        "index_topk": 2,
        "sliding_window": 5,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 5,
        "swiglu_limit": 0.7,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "mlp_layer_types": ["hash_moe", "moe"],
    },
    "muse_spark_text": {
        "head_dim": 12,
        "moe_intermediate_size": 16,
        "moe_hidden_size": 20,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [100.0, 0],
        "final_logit_softcapping": 3.0,
        "output_multiplier": 0.7,
        "qk_scale_factor": 2.0,
        "post_norm_eps": 1e-3,
        "residual_gate_temperature": 3.0,
    },
    "longcat_flash": _MLA
    | {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16}
    | {"routed_scaling_factor": 1.5, "head_dim": 8},
    "llama": {"head_dim": 8},
    "qwen3": {"head_dim": 8, "max_window_layers": 2},
}
# Of any family, and of the machinery that all models of transformers share.
_FOREIGN: Variant = {
    "is_causal": False,
    "attention_chunk_size": 4,
    "use_bidirectional_attention": True,
    "attention_multiplier": 3.0,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "logit_scale": 2.0,
    "embedding_multiplier": 2.0,
    "clip_qkv": 0.1,
    "chunk_size_feed_forward": 2,
    "full_attention_interval": 1,
    "initial_context_length": 16,
    "logits_mup_width_multiplier": 2.0,
    "unpadded_vocab_size": 7,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "qk_head_dim": 3,
    "rotary_dim": 4,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "output_attentions": True,
    "num_labels": 5,
    "torch_dtype": "bfloat16",
    "quantization_config": None,
    "auto_map": {"AutoConfig": "configuration_other.OtherConfig"},
    "per_layer_config": {"1": {"hidden_act": "relu"}},
    "num_nextn_predict_layers": 1,
    "num_mtp_layers": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "moe_layer_freq": 2,
    "seq_aux": False,
    "temperature": 0.5,
    "model_type": "other",
}
_HALF = {"rope_theta": 300.0, "partial_rotary_factor": 0.5}
_ROPES: dict[str, Variant] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {"short_factor": [1.5] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16},
    "proportional": {"factor": 2.0},
    "other": {"factor": 2.0},
}
_ROPE_KEYS: dict[str, list[Any]] = {
    "factor": [ABSENT, None, 1.0, 0.5, 2, 32.0, "4"],
    "original_max_position_embeddings": [ABSENT, None, 8, 64, 128, 0, 20.5],
    "attention_factor": [None, 1.0, 1, 0.7, 2.0, 0.0, -1.0],
    "beta_fast": [None, 4.0, 4, 0, 0.5],
    "beta_slow": [None, 0.5, 2, 0, 40.0],
    "mscale": [None, 0.7, 1, 0.0],
    "mscale_all_dim": [None, 0.7, 1, 0.0],
    "truncate": [None, True, False],
    "low_freq_factor": [ABSENT, None, 0.5, 2, 8.0],
    "high_freq_factor": [ABSENT, None, 2.0, 1, 0.5],
    "partial_rotary_factor": [None, 1.0, 0.5, 0.3, 1.5],
    "rope_theta": [ABSENT, None, 1000.0, 30, 1.0, "many"],
    "unknown_key": [3],
}


class Named(NamedTuple):
    """A variant, and what is different in it."""

    name: str
    config: Variant


@cache
def class_fields(model_type: str) -> dict[str, Any]:
    """Fields of the configuration class of ``transformers``, with their defaults."""
    from transformers import CONFIG_MAPPING

    skip_without(model_type)
    return {field.name: field.default for field in fields(CONFIG_MAPPING[model_type])}


def base(model_type: str) -> Variant:
    """A small model, every key of the class spelled out."""
    from transformers import AutoConfig

    skip_without(model_type)
    whole = AutoConfig.for_model(model_type, **deepcopy(_SIZES | BASES[model_type])).to_dict()
    rope = {"rope_type": "default", "rope_theta": 100.0}
    if FAMILIES[model_type].partial_rotary:
        rope["partial_rotary_factor"] = 0.5
    both = {"main": rope | {"partial_rotary_factor": 0.5}, "compress": rope | _HALF}
    return json.loads(json.dumps(whole)) | {"rope_parameters": both if "compress_rates" in whole else rope}


def variants(model_type: str) -> Iterator[Named]:
    """Every field with other values, keys of others, and rotary embeddings in every spelling; no two alike."""
    start, seen = base(model_type), set()
    for name, changes in [("as it is", {}), *_field_changes(start), *_foreign_changes(start), *_rope_changes(start)]:
        config = {key: value for key, value in (start | changes).items() if value is not ABSENT}
        text = json.dumps(config, sort_keys=True)
        if text not in seen:
            seen.add(text)
            yield Named(name, json.loads(text))


def _field_changes(start: Variant) -> Iterator[tuple[str, Variant]]:
    names = dict.fromkeys([*start, *class_fields(start["model_type"])])
    for key in names:
        if key not in ("model_type", "rope_parameters"):
            for value in _others(key, start.get(key), start):
                yield f"{key}={'absent' if value is ABSENT else json.dumps(value)}", {key: value}


def _others(key: str, value: Any, start: Variant) -> list[Any]:
    layers = start.get("num_hidden_layers")  # LongCat-Flash counts pairs
    if key == "hidden_act":
        return [ABSENT, None, "swish", "gelu", "relu", "nothing"]
    if key == "indexer_types":
        kinds = "full", "shared", "other"
        return [ABSENT, None, [], ["full"], ["full"] * 3, *([list(pair) for pair in product(kinds, repeat=layers)])]
    if key == "layer_types":
        kinds = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
        kinds += ("indexed_attention",) * (value is not None and "indexed_attention" in value)
        if "compress_rates" in start:
            kinds = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "full_attention"
        return [ABSENT, None, [], *([list(pair) for pair in product(kinds, repeat=layers)])]
    if key == "mlp_layer_types":
        kinds = ("hash_moe", "moe", "other") if "compress_rates" in start else ("dense", "sparse", "other")
        return [ABSENT, None, [], ["dense"], ["dense"] * 3, *([list(pair) for pair in product(kinds, repeat=layers)])]
    if key == "compress_rates":
        other = {kind: rate + 1 for kind, rate in value.items()}
        return [ABSENT, None, {}, other, dict.fromkeys(value, 4), dict.fromkeys(value, 1), dict.fromkeys(value, 0)]
    if key == "layer_rope_theta":
        return [ABSENT, None, [], [100.0], *([list(pair) for pair in product((0, 100.0, 50, "0"), repeat=layers)])]
    if key == "mlp_only_layers":
        return [ABSENT, None, [0], [1], [0, 1], [5], [0, 0], 1]
    if isinstance(value, bool):
        return [ABSENT, None, not value, 1]
    if isinstance(value, int):
        return [ABSENT, None, 0, 1, 2, value + 1, 2 * value, -1, float(value), str(value)]
    if isinstance(value, float):
        return [ABSENT, None, 0.0, 2 * value, 0.5, 1, -1.0, str(value)]
    return [ABSENT, None, True, False, 0, 1, 2, 0.1, "eager", [1], {"a": 1}]


def _foreign_changes(start: Variant) -> Iterator[tuple[str, Variant]]:
    for key, value in _FOREIGN.items():
        yield f"{key}={json.dumps(value)}", {key: value}
    for other in (family for family in FAMILIES if not lacks(family)):
        for key, value in base(other).items():
            if key not in start and value is not None:
                yield f"{key}={json.dumps(value)}", {key: value}
    yield "window", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ABSENT}
    late = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": ABSENT}
    yield "window, later", late
    yield "window, no width", {"use_sliding_window": True, "sliding_window": None}
    yield "odd shared width", {"shared_expert_intermediate_size": 20}
    for step, listed in product((1, 2, 3), ([], [0], [1])):
        yield f"step {step} but {listed}", {"decoder_sparse_step": step, "mlp_only_layers": listed}
    schedules = ("FS", 1, 2), ("SF", 1, 2), (None, 2, 1), (None, 2, 2), (None, 0, 0)
    for pattern, frequency, offset in schedules if "indexer_types" in start else ():
        schedule = {"index_topk_freq": frequency, "index_skip_topk_offset": offset, "indexer_types": ABSENT}
        yield f"choices {pattern} {frequency} {offset}", schedule | {"index_topk_pattern": pattern}
    for interval in (1, 2, 3):
        yield f"interval {interval}", {"full_attention_interval": interval, "layer_types": ABSENT}


def _rope_changes(start: Variant) -> Iterator[tuple[str, Variant]]:
    bare = {"rope_parameters": ABSENT}
    yield "no rope", bare
    for empty in (None, {}, [], "yarn"):
        yield f"rope_parameters={empty}", {"rope_parameters": empty}
        yield f"rope_scaling={empty}", {"rope_scaling": empty}
        yield f"rope_scaling={empty} alone", bare | {"rope_scaling": empty, "rope_theta": 50.0}
    for kind, keys in _ROPES.items():
        rope = {"rope_type": kind} | keys
        other = start["rope_parameters"]
        places = {
            "rope_parameters": {"rope_parameters": rope},
            "rope_parameters, theta in it": {"rope_parameters": rope | {"rope_theta": 50.0}},
            "rope_parameters, theta above": {"rope_parameters": rope, "rope_theta": 50.0},
            "two thetas": {"rope_parameters": rope | {"rope_theta": 30.0}, "rope_theta": 50.0},
            "rope_scaling": bare | {"rope_scaling": rope},
            "rope_scaling, theta above": bare | {"rope_scaling": rope, "rope_theta": 50.0},
            "rope_scaling by its old name": bare | {"rope_scaling": {"type": kind} | keys},
            "rope_scaling beside the default": {"rope_scaling": rope},
            "rope_scaling beside the default, theta above": {"rope_scaling": rope, "rope_theta": 50.0},
            "rope_scaling beside rope_parameters": {"rope_scaling": rope, "rope_parameters": rope | {"factor": 2.0}},
            "rope_parameters beside rope_scaling": {"rope_scaling": other, "rope_parameters": rope},
            "context above": {"rope_parameters": rope, "original_max_position_embeddings": 8},
            "context above alone": {
                "rope_parameters": {k: v for k, v in rope.items() if k != "original_max_position_embeddings"},
                "original_max_position_embeddings": 8,
            },
            "share above": {"rope_parameters": rope, "partial_rotary_factor": 0.25},
            "share above and in it": {
                "rope_parameters": rope | {"partial_rotary_factor": 0.75},
                "partial_rotary_factor": 0.25,
            },
            "whole share above": {"rope_parameters": rope, "partial_rotary_factor": 1.0},
            "by kind of layer": {"rope_parameters": {"full_attention": rope, "linear_attention": rope}},
        }
        for place, changes in places.items():
            yield f"{kind} in {place}", changes
        for key, values in _ROPE_KEYS.items():
            for value in values if kind in ("default", "yarn", "llama3") else values[:2]:
                changed = {k: v for k, v in (rope | {"rope_theta": 100.0, key: value}).items() if v is not ABSENT}
                if "compress" in other:
                    yield (
                        f"{kind}, compress, {key}={'absent' if value is ABSENT else value}",
                        {"rope_parameters": other | {"compress": {"partial_rotary_factor": 0.5} | changed}},
                    )
                yield f"{kind}, {key}={'absent' if value is ABSENT else value}", {"rope_parameters": changed}
    yarn = {"rope_theta": 100.0, "rope_type": "yarn"} | _ROPES["yarn"]
    for mscale, all_dim, factor in product((None, 0.7, 1.0), (None, 0.5, 1.0), (None, 0.8)):
        both = {"mscale": mscale, "mscale_all_dim": all_dim, "attention_factor": factor}
        yield f"yarn, {both}", {"rope_parameters": yarn | both}
    for theta, fast, slow in product((2.0, 1.5), (32, 1), (1, 32)):
        steep = {"rope_theta": theta, "beta_fast": fast, "beta_slow": slow, "truncate": False}
        yield f"yarn, {steep}", {"rope_parameters": yarn | steep}


class Reference:
    """What ``transformers`` makes of a ``config.json``: a model with random weights, or why there is none."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig

        self.config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = _build(deepcopy(self.config))
        plain = names_in_class(model).plain
        named = ((plain(name), tensor) for name, tensor in model.state_dict().items())
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named if name is not None}
        self.is_small = sum(tensor.numel() for tensor in model.state_dict().values()) <= MAX_PARAMS
        if not self.is_small:
            return
        self.model = _build(self.config).eval()
        self.whole = self.model.state_dict()
        for name, tensor in self.whole.items():
            tensor.copy_(_random(plain(name) or name, tensor.shape))
        self.state = {name: tensor for key, tensor in self.whole.items() if (name := plain(key)) is not None}
        with torch.no_grad():
            self.logits = self.model(_tokens(self.config.vocab_size)).logits
        if not self.logits.isfinite().all():
            raise ArithmeticError("logits that are no numbers")


def _build(config: Any) -> Any:
    """A model of transformers with this text model, which is in a wrapper if there is no class for text alone."""
    config = in_wrapper(config)
    return loading_class(config, whole=True).from_config(config, dtype=torch.float32)


@cache
def _random(name: str, shape: torch.Size) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith("A_log"):
        return 0.5 * noise - 3
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("tid2eid"):  # a row of a permutation has no expert twice
        return noise.argsort(-1)
    return 0.3 * noise if len(shape) < 2 else noise * shape[-1] ** -0.5


@cache
def _tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (2, SEQ), generator=torch.Generator().manual_seed(1))


def outcome(config: Variant, folder: Path) -> str:
    """``equal``, ``refused``, ``reference fails``, or what is wrong."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        theirs = Reference(folder)
    except Exception:  # transformers raises anything
        theirs = None
    try:
        ours = model_config_from_hf(folder)
    except ConfigError as error:
        assert str(error).count("model.hf_path=") == 1
        return "refused" if theirs else "reference fails"
    if theirs is None:
        return "reference fails"
    keys = family_of(ours).keys.in_memory
    wanted = hf_tensors(ours, keys)
    if set(wanted) != {name for name in theirs.shapes if name in wanted or not _tied(name, ours)}:
        return "refused"  # by the catalog, which compares names and shapes
    if any(tuple(shape) != theirs.shapes[name] for name, shape in wanted.items()):
        return "refused"
    if not theirs.is_small:
        return "equal"
    model = build_decoder(ours, MoEConfig(experts="loop"), torch.float32)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("load_fractions"):  # of training
                tensor.zero_()
                continue
            tensor.copy_(as_our_tensor(name, tensor.shape, theirs.state, ours))
        logits = model.eval()(_tokens(ours.vocab_size))
    if (off := _relative(logits, theirs.logits)) > TOLERANCE:
        return f"logits are {off:.2g} off"
    return _round_trip(ours, config, theirs, folder)


def _tied(name: str, ours: Any) -> bool:
    return ours.tie_embeddings and name == "lm_head.weight"


def _round_trip(ours: Any, config: Variant, theirs: Reference, folder: Path) -> str:
    """The written config.json is the same model, to us and to transformers."""
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(family_of(ours).write_config(ours, config)))
    if model_config_from_hf(folder) != ours:
        return "what is written reads otherwise"
    again = _build(AutoConfig.from_pretrained(folder)).eval()
    again.load_state_dict(theirs.whole)
    with torch.no_grad():
        off = _relative(again(_tokens(ours.vocab_size)).logits, theirs.logits)
    return "equal" if off < TOLERANCE else f"written, logits are {off:.2g} off"


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    off = float((ours - theirs).norm() / theirs.norm())
    return off if off == off else float("inf")
