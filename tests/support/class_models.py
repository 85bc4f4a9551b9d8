"""Small models of classes of transformers without a native family, saved as transformers saves them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from automoe.classes.build import decoder_layers
from automoe.classes.family import FAMILY
from automoe.classes.model import TransformersModel, spans
from automoe.comm.tokens import MicroBatch
from automoe.config.data_schema import DataConfig
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.read import load_hf
from automoe.hf.transformers_models import loading_class
from automoe.model.init import default_dtype
from automoe.parallel.parallelize import build_decoder
from automoe.verify.trajectory import Trajectory, run_trajectory
from tests.support.releases import skip_without

SIZES: dict[str, Any] = dict(
    vocab_size=300, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, n_routed_experts=8, num_local_experts=8,
    num_experts_per_tok=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4,
    head_dim=4, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
INDEXER: dict[str, Any] = dict(index_topk=8, index_n_heads=2, index_head_dim=8)
MAMBA: dict[str, Any] = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_expand=2, mamba_chunk_size=8)
KIMI_DELTA: dict[str, Any] = MLA | dict(
    linear_head_dim=8, linear_num_heads=4, layer_types=["linear_attention", "full_attention", "linear_attention"]
)
VISION: dict[str, Any] = dict(
    depth=1, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
    num_position_embeddings=16, deepstack_visual_indexes=[0],
)  # fmt: skip
AUDIO: dict[str, Any] = dict(
    d_model=16, hidden_size=16, encoder_layers=1, num_hidden_layers=1, encoder_attention_heads=2, num_attention_heads=2,
    encoder_ffn_dim=16, num_mel_bins=16, output_dim=32, downsample_hidden_size=8, max_source_positions=64, n_window=4,
)  # fmt: skip
INKLING2: dict[str, Any] = dict(
    unpadded_vocab_size=290, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, d_rel=4,
    rel_extent=16, sliding_window_size=8, layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
)  # fmt: skip
SMALL_SAM: dict[str, Any] = dict(
    sam_config=dict(
        hidden_size=16, output_channels=8, num_hidden_layers=1, num_attention_heads=2, image_size=64, mlp_dim=16,
        global_attn_indexes=[0], downsample_channels=[8, 16],
    ),
    encoder_config=dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    ),
)  # fmt: skip
WINDOWS: dict[str, Any] = dict(
    sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
)  # fmt: skip
DENSE_FIRST: dict[str, Any] = dict(mlp_layer_types=["dense", "sparse", "sparse"])
DELTA_NET: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, shared_expert_intermediate_size=16,
)  # fmt: skip
# What a class wants beyond the sizes above, so that it has every kind of layer, and blocks and windows within rows.
MORE: dict[str, dict[str, Any]] = {
    "afmoe": WINDOWS | dict(num_dense_layers=1),
    "axk1": MLA,
    "axk2": MLA | INDEXER,
    "beam": WINDOWS | DENSE_FIRST | dict(n_group=1, topk_group=1),
    "bailing_hybrid": KIMI_DELTA | dict(num_mtp_layers=0),
    "cohere2_moe": WINDOWS,
    "dbrx": dict(
        d_model=32, n_heads=4, n_layers=3, attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=8, moe_top_k=2, hidden_size=32),
    ),
    "deepseek_ocr2_text": DENSE_FIRST,
    "deepseek_ocr2_vision": SMALL_SAM,
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA | INDEXER,
    "deepseek_v4": dict(
        num_key_value_heads=1, q_lora_rank=16, qk_rope_head_dim=4, o_groups=2, o_lora_rank=8, index_n_heads=2,
        index_head_dim=8, index_topk=2, sliding_window=8, hc_mult=2, num_nextn_predict_layers=0, num_hidden_layers=4,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8),
    ),
    "dots1": dict(n_shared_experts=1, n_group=1, topk_group=1),
    "dots3_note_text": MLA | INDEXER | dict(sliding_window=8),
    "exaone_moe": WINDOWS | DENSE_FIRST,
    "flint": WINDOWS | dict(num_hidden_layers=4, mlp_only_layers=[0], layer_types=["full_attention", *WINDOWS["layer_types"]]),
    "gemma4_text": dict(
        enable_moe_block=True, top_k_experts=2, hidden_size_per_layer_input=0, global_head_dim=8,
        final_logit_softcapping=30.0, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "glm4_moe_lite": MLA,
    "glm4v_moe_text": dict(
        head_dim=16, n_group=1, topk_group=1,
        rope_parameters=dict(
            rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]
        ),
    ),
    "glm5_next_text": MLA | INDEXER | dict(
        index_kpool=4, qk_rope_head_dim=0, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ) | DENSE_FIRST,
    "glm_moe_dsa": MLA | INDEXER,
    "gpt_oss": WINDOWS,
    "granitemoe_swa": WINDOWS,
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention", "mamba"], shared_intermediate_size=16),
    "hy_v4": dict(index_topk=8),
    "hy_v4_vl_text": dict(index_topk=8),
    "inkling_text": dict(sliding_window_size=8, layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"]),
    "inkling2_text": INKLING2,
    "inkling2_loop_text": INKLING2
    | dict(num_hidden_layers=4, layer_types=["hybrid_sliding", "hybrid"] * 2, loop_layer_index_start=1, loop_layer_index_end=3, n_layers_per_attn_res_block=1),
    "jamba": dict(
        num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1,
    ),
    "kimi_linear": KIMI_DELTA,
    "kimi_k25_vision": dict(num_attention_heads=2, hidden_size=32, intermediate_size=32),
    "kolibri1": WINDOWS,
    "laguna": dict(num_attention_heads_per_layer=[4, 4, 4]) | DENSE_FIRST,
    "lfm2_moe": dict(layer_types=["full_attention", "conv", "full_attention"], num_dense_layers=1),
    "longcat_flash": MLA | dict(
        num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=16, moe_topk=2, zero_expert_num=2
    ),
    "mimo_v2_flash": WINDOWS | dict(num_hidden_layers=4, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        layer_types=["full_attention", *WINDOWS["layer_types"]]),
    "minimax": dict(block_size=8),
    "minimax_m3_vl_text": INDEXER | dict(
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], index_block_size=4,
        index_topk_blocks=2, rotary_dim=4,
    ),
    "llama4_text": dict(
        head_dim=8, intermediate_size_mlp=48, attention_chunk_size=8, interleave_moe_layer_step=2, num_hidden_layers=4,
    ),
    "mistral4": MLA | dict(head_dim=12),
    "mistral_large4_text": MLA | INDEXER,
    "mistral_large4_vision": dict(num_attention_heads=2),
    "muse_spark_audio": dict(
        patch_sizes=[4], hidden_sizes=[16], depths=[1], num_hidden_layers=1, out_hidden_size=32
    ),
    "muse_spark_text": dict(sliding_window=8, moe_hidden_size=16, layer_types=WINDOWS["layer_types"]),
    "muse_spark_vision": dict(num_attention_heads=2),
    "nemotron_h": dict(chunk_size=8),
    "phimoe": dict(router_jitter_noise=0.0, input_jitter_noise=0.0, lm_head_bias=False),
    "qwen3_omni_moe_text": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]),
    ),
    "qwen3_5_moe_text": DELTA_NET,
    "qwen3_next": DELTA_NET,
    "step3p5": dict(sliding_window=8) | DENSE_FIRST,
    "step3p5_vision": dict(num_attention_heads=2),
    "unlimited_ocr_text": DENSE_FIRST | dict(sliding_window=8),
    "unlimited_ocr_vision": SMALL_SAM,
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
}  # fmt: skip


def hf_class_config(model_type: str, **more: Any) -> Any:
    """Return a configuration of small sizes; of a wrapper, around a text model of these sizes."""
    from transformers import CONFIG_MAPPING

    skip_without(model_type)
    kind = CONFIG_MAPPING[model_type]
    if "text_config" not in kind.sub_configs:
        return kind(**(SIZES | MORE.get(model_type, {}) | more))
    # Kimi's names AutoConfig there, and deepseek_v3 as what it stands for.
    text_type = getattr(kind.sub_configs["text_config"], "model_type", None) or "deepseek_v3"
    text = SIZES | MORE.get(text_type, {}) | {"model_type": text_type} | more
    beside = {
        name: sizes | MORE.get(getattr(kind.sub_configs[name], "model_type", None) or f"{model_type}_vision", {})
        for name, sizes in (("vision_config", VISION), ("audio_config", AUDIO))
        if name in kind.sub_configs
    }
    return kind(text_config=text, tie_word_embeddings=text.get("tie_word_embeddings", False), **beside)


ROW = 12  # tokens of the shortest rows that classes are compared on


def kinds_of_layers(config: Any) -> tuple[set[frozenset[str]], dict[str, int]]:
    """Return the kinds of layers of a configuration's class, and its blocks, windows and rates by name.

    A kind is the classes of a layer's modules, and which sizes and types they have.
    """
    with torch.device("meta"):
        model = loading_class(config, whole=True).from_config(config)
    kinds, sizes = set(), {}
    for layer in decoder_layers(model):
        if any(word in type(layer).__name__ for word in ("Vision", "Audio", "Pixtral")):
            continue
        kind = set()
        for module in layer.modules():
            kind.add(type(module).__name__)
            for key, value in vars(module).items():
                if (
                    isinstance(value, str)
                    and key.endswith("_type")
                    or isinstance(value, bool)
                    and key.endswith("sliding")
                ):
                    kind.add(f"{key}={value}")
                elif one := max((size for _, size in spans({key: value})), default=0):
                    kind.add(key)
                    sizes[key] = max(one, sizes.get(key, 0))
        kinds.add(frozenset(kind))
    return kinds, sizes


# What a class's default lacks, which has no experts by itself.
WITH_EXPERTS = {"gemma4_text": dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=16)}


def lacks(model_type: str) -> list[str]:
    """Return what the small model of a class lacks: kinds of layers of the default one, sizes within a row."""
    from transformers import CONFIG_MAPPING

    kinds, sizes = kinds_of_layers(hf_class_config(model_type))
    try:
        whole, _ = kinds_of_layers(CONFIG_MAPPING[model_type](**WITH_EXPERTS.get(model_type, {})))
    except (AttributeError, TypeError):  # the default of some classes lacks numbers
        whole = set()
    shared = frozenset.intersection(*whole) if whole else frozenset()
    found = [f"a layer with {', '.join(sorted(kind - shared)) or 'nothing more'}" for kind in whole - kinds]
    return found + [f"{name}={size} within a row of {ROW}" for name, size in sizes.items() if size >= ROW]


def save_class(model_type: str, folder: Path, **more: Any) -> Any:
    """Save a model with weights that tell experts apart; return it, in evaluation mode."""
    torch.manual_seed(1)
    config = hf_class_config(model_type, **more)
    model = loading_class(config, whole=True).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer in model.buffers():
            if buffer.dtype == torch.int64 and buffer.dim() == 2:  # experts by token id, different ones for a token
                ids = torch.arange(len(buffer)).unsqueeze(1) * 3 + torch.arange(buffer.shape[1])
                buffer.copy_(ids % SIZES["num_experts"])
    model.save_pretrained(folder)
    return model


class AllInFloat64(TorchFunctionMode):
    """What a class of transformers computes in float32, it computes in float64 within this context."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(value: Any) -> Any:
            casts = value is torch.float32 and func is not torch.Tensor.view
            return torch.float64 if casts else value

        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def trajectory_in_float64(*args: Any, **given: Any) -> Trajectory:
    """Run ``run_trajectory`` with all parts of a class in float64."""
    with AllInFloat64():
        return run_trajectory(*args, **given)


def tier_config(path: Path) -> ModelConfig:
    """Return the configuration in the tier of any class, one with a native family too."""
    skip_without(f"the class of {json.loads((path / 'config.json').read_text())['model_type']}")
    return FAMILY.read_config({}, str(path))


def run_config(path: Path, mesh: MeshConfig, **train: object) -> Config:
    """Return a run of 8 short rows a step, in float64, with random weights."""
    sizes = dict(seq_len=24, global_batch_size=8, micro_batch_size=1, dtype="float64") | train
    return Config(
        mesh=mesh,
        model=replace(tier_config(path), random_weights=True, initializer_range=0.1),
        moe=MoEConfig(experts="loop"),
        train=TrainConfig(**sizes),
        data=DataConfig(tokenizer="byte", document_mask=False),
    )


def float64_of(config: ModelConfig, experts: str = "loop") -> tuple[TransformersModel, torch.nn.Module]:
    """Return the tier's model and that of transformers, with the weights of ``config.hf_path``."""
    from transformers import AutoConfig

    kind = loading_class(AutoConfig.from_pretrained(config.hf_path), whole=True)
    with default_dtype(torch.float64):
        ours = TransformersModel(config, MoEConfig(experts=experts))
    ours.to_empty(device="cpu")
    load_hf(ours, str(config.hf_path))
    theirs = kind.from_pretrained(config.hf_path, dtype=torch.float64, experts_implementation="eager")
    return ours.train(), theirs.train()


def against_class(config: ModelConfig, experts: str = "loop") -> tuple[TransformersModel, float]:
    """Return the tier's model, and the worst relative difference of loss and gradients from the class."""
    ours, theirs = float64_of(config, experts)
    tokens = torch.randint(config.vocab_size, (2, ROW + 1), generator=torch.Generator().manual_seed(2))
    loss = ours(batch=MicroBatch(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())).sum()
    logits = theirs(tokens[:, :-1], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten())
    loss.backward()
    expected.backward()
    theirs_of = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    mine_of = {name: one.grad for name, one in ours.named_parameters() if one.grad is not None}
    for name in mine_of.keys() - theirs_of.keys():  # of a parameter that no token reached
        assert not mine_of.pop(name).any(), name
    assert mine_of.keys() == theirs_of.keys()
    off = [float((mine_of[name] - grad).norm() / grad.norm().clamp_min(1e-30)) for name, grad in theirs_of.items()]
    worst = float(torch.tensor([abs(float(loss - expected)), *off], dtype=torch.float64).max())  # NaN if one is
    return ours, worst


def compare_with_class(model_type: str, folder: Path) -> dict[str, Any]:
    """Save a small model; return the worst difference of the tier on one rank from the class, and if documents are apart."""
    from tests.support.class_models import against_class, save_class, tier_config

    save_class(model_type, folder)
    try:
        config = tier_config(folder)
        with AllInFloat64():
            ours, worst = against_class(config)
    except ConfigError as error:
        return {"failed": error.rule}
    row = {"one": worst, "apart": True}
    try:
        with AllInFloat64():
            ours.check_isolation()
    except ConfigError:
        row["apart"] = False
    return row


def step_ratio(model_type: str, folder: Path) -> float:
    """Return CPU seconds of forward and backward in the tier over the native family's, best of five each, in turns."""
    tier, native = _seconds(
        model_type, folder, lambda: _part(tier_config(folder)), lambda: _part(model_config_from_hf(folder))
    )
    return tier / native


def experts_seconds(model_type: str, folder: Path) -> tuple[float, float]:
    """Return CPU seconds of a step with automoe's grouped products, and with those of transformers, as ``step_ratio``."""

    def theirs() -> torch.nn.Module:
        with patch("automoe.classes.model.are_swiglu", lambda experts: False):
            return _part(tier_config(folder))

    ours, others = _seconds(model_type, folder, lambda: _part(tier_config(folder)), theirs)
    return ours, others


def _part(config: ModelConfig) -> torch.nn.Module:
    part = build_decoder(config, MoEConfig(experts="grouped_mm"), torch.float32)
    part.to_empty(device="cpu")
    load_hf(part, str(config.hf_path))
    return part.train()


def _seconds(model_type: str, folder: Path, *makers: Callable[[], torch.nn.Module]) -> list[float]:
    save_class(
        model_type, folder, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, head_dim=64,
        vocab_size=1024, max_position_embeddings=1024,
    )  # fmt: skip
    parts = [make() for make in makers]
    tokens = torch.randint(1024, (2, 513), generator=torch.Generator().manual_seed(2))
    best = [inf, inf]
    for _ in range(6):  # the first of them warms up
        for number, part in enumerate(parts):
            start = time.process_time()
            part(batch=MicroBatch(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())).sum().backward()
            best[number] = min(best[number], time.process_time() - start)
    return best
