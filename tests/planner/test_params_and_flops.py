"""Parameter counts against the published names, FLOPs against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from automoe.comm.tokens import MicroBatch
from automoe.config.schema import AttentionConfig, ModelConfig, MoEConfig, TrainConfig
from automoe.model.decoder import Decoder
from automoe.model.lora import freeze_and_adapt
from automoe.model.params import PARTS, count_params, layer_params, model_params
from automoe.model.trainable import is_trained, with_adapters
from automoe.observe.flops import step_flops_per_token, train_flops_per_token
from automoe.parallel.parallelize import allocate, build_decoder
from tests.support.configurations import quick_config, quick_model


def preset(name: str) -> ModelConfig:
    return quick_model(name)


def gqa_model(
    hidden: int, layers: int, heads: int, kv_heads: int, experts: int, top_k: int, width: int, **rest
) -> ModelConfig:
    attention = AttentionConfig(kind="gqa", num_heads=heads, num_kv_heads=kv_heads, head_dim=128)
    return ModelConfig(
        hidden_size=hidden,
        num_layers=layers,
        attention=attention,
        num_experts=experts,
        num_experts_per_token=top_k,
        moe_intermediate_size=width,
        **rest,
    )


PRESETS = ("dsv3_671b", "moonlight_16b_a3b", "qwen3_30b_a3b", "mixtral_8x22b")
MIXTRAL_8X22B = gqa_model(6144, 56, 48, 8, 8, 2, 16384, vocab_size=32768)
MIXTRAL_G8T8 = gqa_model(6144, 56, 48, 8, 64, 8, 2048, vocab_size=32768)
LLAMA3_8X70B = gqa_model(8192, 80, 64, 8, 8, 2, 28672, vocab_size=128256)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("dsv3_671b", 671.0, 37.5),
        ("moonlight_16b_a3b", 15.96, 2.91),
        ("qwen3_30b_a3b", 30.5, 3.35),
        ("mixtral_8x22b", 140.6, 39.1),
    ],
)
def test_presets_have_the_published_sizes(name: str, total: float, active: float) -> None:
    count = count_params(preset(name))
    assert count.total / 1e9 == pytest.approx(total, abs=0.06)
    assert count.active / 1e9 == pytest.approx(active, abs=0.06)
    assert set(count.by_part) == set(PARTS)
    assert sum(count.by_part.values()) == count.total == sum(param.numel for param in model_params(preset(name)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name",
    [*PRESETS, "qwen2_57b_a14b", "glm45_355b_a32b", "llama3_8b", "qwen3_8b"]
    + ["small_dsv3", "small_mixtral", "small_qwen3_moe", "small_gpt_oss", "small_qwen3_next"]
    + ["small_qwen3_5_moe", "qwen3_5_35b_a3b", "glm47_flash_30b_a3b"]
    + ["minimax_m2_230b_a10b", "olmoe_7b_a1b", "dsv32_672b", "small_glm_moe_dsa", "small_granite"]
    + ["dsv2_lite_16b_a2b", "small_dsv2", "ernie45_21b_a3b", "small_ernie45"]
    + ["dsv4_flash_284b_a13b", "small_dsv4", "small_muse", "small_longcat"],
)
def test_names_and_shapes_are_those_of_the_model(name: str, tied: bool) -> None:
    config = replace(preset(name), tie_embeddings=tied)
    with torch.device("meta"):
        model = Decoder(config, MoEConfig())
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {param.name: param.shape for param in model_params(config)} == built


def test_names_are_unique_and_layers_differ_where_the_ffn_does() -> None:
    model = preset("dsv3_671b")
    names = [param.name for param in model_params(model)]
    assert len(set(names)) == len(names)
    assert {param.part for param in layer_params(model, 2)} == {"norms", "attention", "dense_ffn"}
    moe_parts = {"norms", "attention", "router", "routed_experts", "shared_experts"}
    assert {param.part for param in layer_params(model, 3)} == moe_parts


def test_a_tied_head_is_counted_once() -> None:
    model = preset("qwen3_30b_a3b")
    tied = count_params(replace(model, tie_embeddings=True))
    assert count_params(model).total - tied.total == model.vocab_size * model.hidden_size
    assert tied.by_part["head"] == 0


@pytest.mark.parametrize(
    ("model", "num_mtp", "causal", "full"),
    [
        pytest.param("dsv3_671b", 1, 260.0, None, id="DeepSeek-V3 with MTP"),
        pytest.param("dsv3_671b", 0, None, 280.5, id="DeepSeek-V3, full attention"),
        pytest.param("qwen3_30b_a3b", 0, 23.0, None, id="Qwen3-30B"),
        pytest.param("qwen3_235b_a22b", 0, 148.0, None, id="Qwen3-235B"),
        pytest.param(MIXTRAL_8X22B, 0, 242.2, 250.7, id="Mixtral-8x22B"),
        pytest.param(MIXTRAL_G8T8, 0, 140.7, 149.2, id="Mixtral-8x22B-G8T8"),
        pytest.param("qwen2_57b_a14b", 0, 84.7, 87.1, id="Qwen2-57B"),
        pytest.param(LLAMA3_8X70B, 0, 771.4, 787.5, id="Llama3-8x70B"),
    ],
)
def test_flops_per_token_match_published_figures(
    model: ModelConfig | str, num_mtp: int, causal: float | None, full: float | None
) -> None:
    model = preset(model) if isinstance(model, str) else model
    flops = train_flops_per_token(replace(model, num_mtp_layers=num_mtp), seq_len=4096)
    if causal is not None:
        assert flops.causal / 1e9 == pytest.approx(causal, abs=0.06)
    if full is not None:
        assert flops.full_attention / 1e9 == pytest.approx(full, abs=0.06)


def test_biases_cost_nothing_and_a_gate_its_row() -> None:
    model = preset("qwen2_57b_a14b")
    plain = replace(model, attention=replace(model.attention, qkv_bias=False), shared_expert_gate=False)
    extra = train_flops_per_token(model, 1024).causal - train_flops_per_token(plain, 1024).causal
    assert extra == 6 * model.hidden_size * model.num_layers
    biases = (model.attention.num_heads + 2 * model.attention.num_kv_heads) * model.attention.head_dim
    assert count_params(model).total - count_params(plain).total == model.num_layers * (biases + model.hidden_size)


def test_mfu_is_the_share_of_the_peak_in_both_conventions() -> None:
    flops = train_flops_per_token(preset("qwen3_30b_a3b"), seq_len=4096)
    mfu, mfu_full = flops.mfu(tokens_per_second=1e6, peak_flops=64 * 989.5e12)
    assert mfu == pytest.approx(1e6 * flops.causal / (64 * 989.5e12))
    assert mfu_full / mfu == pytest.approx(flops.full_attention / flops.causal)


def test_a_window_costs_the_band_that_it_leaves() -> None:
    """Two layers, one with a window of 3 over rows of 10: 1 + 2 + 8 * 3 scores, and half of 100 for the other;
    the middle of a border's triangle is counted, as half of the matrix is for whole rows."""
    model = preset("small_gpt_oss")
    model = replace(model, num_layers=2, attention=replace(model.attention, sliding_window=3))
    whole = replace(model, attention=replace(model.attention, full_attention_interval=1, sliding_window=0))
    with_window, without = (train_flops_per_token(m, seq_len=10) for m in (model, whole))
    score = 6 * model.attention.num_heads * 2 * model.attention.head_dim
    assert without.causal - with_window.causal == pytest.approx(score * (10 / 2 - (3 - 9 / 20)))
    assert without.full_attention - with_window.full_attention == pytest.approx(score * (10 - 3))


def test_compressed_attention_costs_its_window_and_its_entries() -> None:
    """Rows of 24: a window of 4; six entries of four positions, of which an indexer chooses two, and three of eight."""
    attention = AttentionConfig(
        kind="compressed",
        num_heads=4,
        head_dim=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        sliding_window=4,
        o_groups=2,
        o_lora_rank=8,
        index_topk=2,
        index_n_heads=2,
        index_head_dim=8,
        compress_ratios=[0, 4, 8],
    )
    model = replace(preset("small_dsv3"), attention=attention, num_layers=3)
    found = train_flops_per_token(model, seq_len=24)
    matrices = 6 * sum(
        param.numel * (model.num_experts_per_token / model.num_experts if param.expert else 1)
        for param in model_params(model)
        if param.multiplies and param.part not in ("embedding", "router") and not param.spec.detached
    )
    indexer = 4 * sum(p.numel for p in model_params(model) if p.multiplies and p.spec.detached)  # no gradient of inputs
    assert indexer > 0
    score = 6 * attention.num_heads * 2 * attention.head_dim
    index = attention.index_n_heads * attention.index_head_dim
    window, chosen = 4 - 4 * 4 / 48, 2 - 2 * 2 / 12
    causal = score * (3 * window + chosen + 3 / 2) + index * (2 * 6 / 2 + 4 * chosen)
    assert found.causal == pytest.approx(matrices + indexer + causal)
    full = score * (3 * 4 + 2 + 3) + index * (2 * 6 + 4 * 2)
    assert found.full_attention == pytest.approx(matrices + indexer + full)


def test_a_delta_net_costs_its_state_whatever_the_row() -> None:
    """Three layers of four: three products of Dk x Dv numbers a value head, 2 FLOPs each and thrice for training."""
    model = preset("small_qwen3_next")
    linear = replace(model, num_layers=3)
    short, long = (train_flops_per_token(linear, seq_len) for seq_len in (64, 4096))
    assert short == long
    attention = model.attention
    state = attention.linear_num_value_heads * attention.linear_key_head_dim * attention.linear_value_head_dim
    larger = replace(linear, attention=replace(attention, linear_num_value_heads=16))
    matrices = [
        sum(p.numel for p in layer_params(m, 0) if p.part == "attention" and p.name.endswith("proj.weight"))
        + sum(p.numel for p in layer_params(m, 0) if "in_proj" in p.name)
        for m in (linear, larger)
    ]
    extra = train_flops_per_token(larger, 64).causal - short.causal
    assert extra == 3 * (6 * (matrices[1] - matrices[0]) + 3 * 6 * state)


def test_dense_layers_cost_their_own_width() -> None:
    model = preset("moonlight_16b_a3b")
    wider = replace(model, intermediate_size=model.intermediate_size + 1)
    extra = train_flops_per_token(wider, 1024).causal - train_flops_per_token(model, 1024).causal
    assert extra == 6 * 3 * model.hidden_size * model.first_k_dense


def products_of_a_token(*overrides: str) -> tuple[float, float]:
    """FLOPs of all matrix products of a token's step but those of attention scores: planned, and counted by torch."""
    config = quick_config(overrides=[*overrides, "moe.experts=loop", "train.seq_len=64", "model.num_layers=2"])
    model = config.model
    part = build_decoder(model, config.moe, torch.float32)
    freeze_and_adapt(part, config, torch.float32, torch.float32)
    allocate({0: part}, torch.device("cpu"))
    for parameter in part.parameters():
        parameter.data.normal_(0, 0.02)
    tokens = torch.arange(128).view(2, 64)
    in_place = {torch.ops.aten.addmm_: lambda added, a, b, out_shape: 2 * a[0] * a[1] * b[1]}
    aten = torch.ops.aten  # torch counts attention on CPUs from 2.15 on
    attention = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    uncounted = dict.fromkeys(attention, lambda *shapes, **others: 0)
    with FlopCounterMode(display=False, custom_mapping=in_place | uncounted) as counter:
        part(batch=MicroBatch(tokens, labels=tokens)).sum().backward()
    flops = step_flops_per_token(config)
    planned = flops.full_attention - 2 * (flops.full_attention - flops.causal)  # no windows: half of it is masked
    below = is_trained("embed_tokens.weight", config)
    for layer in range(model.num_layers):
        params = with_adapters(layer_params(model, layer), config)
        below = below or any(p.trained for p in params if p.part in ("attention", "norms"))
        for param in params:
            if param.part == "router":
                planned += param.numel * (2 + 2 * below + 2 * param.trained)
            if param.name.endswith("lora.A2"):  # x A.T of down is made again in the backward pass
                planned += 2 * param.numel * model.num_experts_per_token / model.num_experts
        below = below or any(p.trained for p in params)
    return planned, counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize(
    "overrides",
    [
        "model=small_qwen3_moe",
        "model=small_qwen3_moe lora.rank=8",
        "model=small_dsv3 lora.rank=8",
        "model=small_dsv3 lora.rank=8 lora.targets=[o_proj,experts.down_proj]",
        "model=small_qwen3_moe lora.rank=8 lora.targets=[experts]",
        "model=small_qwen3_moe train.freeze=[embed*,layers.0*]",
        "model=small_dsv3 train.freeze=['*'] train.trainable=['layers.1.self_attn*']",
    ],
)
def test_flops_of_what_is_trained_are_those_that_torch_counts(overrides: str) -> None:
    planned, counted = products_of_a_token(*overrides.split())
    assert planned == counted


@pytest.mark.parametrize("warmup", [False, True])
def test_an_indexer_is_counted_by_query_and_key(warmup: bool) -> None:
    """DeepSeek-V3.2 beside DeepSeek-V3, one query at a time."""
    dense, sparse = preset("dsv3_671b"), preset("dsv32_672b")
    a, seq, layers = sparse.attention, 4096, sparse.num_layers
    own = sum(param.numel for param in model_params(sparse) if ".indexer." in param.name and param.multiplies)
    assert count_params(sparse).total - count_params(dense).total == own + 2 * layers * a.index_head_dim
    seen = sum(range(1, seq + 1)) / seq
    chosen = sum(min(place, a.index_topk) for place in range(1, seq + 1)) / seq
    pair = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim)
    scores = a.index_n_heads * a.index_head_dim
    config = replace(quick_config(), model=sparse, train=TrainConfig(seq_len=seq))
    if not warmup:
        expected = 4 * own + layers * (6 * pair * (chosen - seen) + scores * (2 * seen + 4 * chosen))
        more = step_flops_per_token(config).causal - train_flops_per_token(dense, seq).causal
        assert more == pytest.approx(expected, rel=5e-3)  # as if keys were a continuum
        return
    config.train = TrainConfig(seq_len=seq, indexer="warmup", freeze=["*"], trainable=["*.indexer.*"])
    none = replace(config, model=dense, train=TrainConfig(seq_len=seq, freeze=["*"], trainable=["norm.weight"]))
    forward = step_flops_per_token(none).causal
    # above the first layer's attention everything has the gradient of its input, on which the losses ride
    assert step_flops_per_token(config).causal > 1.9 * forward
    assert step_flops_per_token(config).causal < 2.1 * forward + layers * 6 * scores * seq + 4 * own
