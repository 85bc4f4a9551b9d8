"""Predicted activation bytes against what autograd really saves, layer by layer on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import flex_attention

import automoe.passes.activation_checkpoint
from automoe.comm.tokens import MicroBatch
from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.recompute import RERUN
from automoe.config.rules_kernels import CHUNK_TOKENS
from automoe.config.schema import Config, LoraConfig, MeshConfig
from automoe.kernels.attention import AttentionFn, attend, attend_in_blocks
from automoe.kernels.delta_rule import CHUNK
from automoe.model.attention_masks import block_masks, dense_masks
from automoe.model.backend import BackendConfig
from automoe.model.decoder import Decoder
from automoe.model.lora import freeze_and_adapt
from automoe.model.params import is_wide
from automoe.parallel.choices import layer_calls
from automoe.parallel.fp8 import apply_fp8
from automoe.parallel.mesh import Meshes, build_meshes
from automoe.passes.recompute import recompute_contexts
from automoe.planner.activations import DELTA_CHUNK, TokenLoad, layer_activation_bytes
from automoe.planner.step_memory import adapter_activation_bytes
from automoe.planner.workspace import head_workspace_bytes, layer_workspaces
from tests.support.configurations import quick_config
from tests.support.gpu import one_rank

NUM_ROWS, SEQ_LEN = 2, 256
TOKENS = NUM_ROWS * SEQ_LEN


def saved_bytes(
    config: Config,
    layers: range,
    dtype: torch.dtype,
    documents: bool,
    recompute: list[str],
    attention: AttentionFn = attend,
) -> int:
    """Bytes of distinct storage, parameters apart, that the backward pass of these layers holds."""
    config = replace(config, parallel=replace(config.parallel, recompute=recompute))
    runtime = BackendConfig(
        attention_kernel=attention,
        masks=block_masks if attention is attend_in_blocks else dense_masks,
        calls=partial(layer_calls, config),
    )
    part = Decoder(config.model, config.moe, layers, embeds=False, predicts=False, backend=runtime).to(dtype)
    if config.train.fp8 != "off":
        apply_fp8(part, meshes_of_one_rank(), config)
    for name, parameter in part.named_parameters():
        if is_wide(name):  # FSDP never narrows these
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(NUM_ROWS, SEQ_LEN, config.model.residual_width, dtype=dtype, requires_grad=True)
    index = torch.arange(SEQ_LEN).expand(NUM_ROWS, SEQ_LEN)
    ignored = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Not the tensor itself: a node would hold its own output, which holds the node, and neither would ever go.
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())

    saved: list[list] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), results_kept(saved):
        batch = MicroBatch(index, doc_ids=(index >= SEQ_LEN // 2).long() if documents else None)
        [output] = part(x, batch=batch)
    assert output.requires_grad
    # Results saved for a recomputation are kept without autograd.
    for result in (result for each in saved for result in each):
        kept.update({tensor.untyped_storage().data_ptr(): tensor for tensor in result if tensor is not None})
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in ignored)


@cache
def meshes_of_one_rank() -> Meshes:
    with one_rank("cpu") as device:
        return build_meshes(resolve_mesh(MeshConfig(dp_shard=1), None), device)


@contextmanager
def results_kept(seen: list[list]) -> Iterator[None]:
    """Adds what every checkpointed call made meanwhile saves for its recomputation to ``seen``."""

    def watched():
        contexts = recompute_contexts()
        seen.append(contexts[0].saved)
        return contexts

    with patch.object(automoe.passes.activation_checkpoint, "recompute_contexts", watched):
        yield


@cache
def composed(*overrides: str) -> Config:
    return quick_config(overrides=list(overrides))


@cache
def bytes_kept(overrides: tuple[str, ...], layer: int, dtype: torch.dtype, names: tuple[str, ...]) -> int:
    return layer_bytes(composed(*overrides), layer, dtype, True, list(names))


def layer_bytes(
    config: Config,
    layer: int,
    dtype: torch.dtype,
    documents: bool,
    recompute: list[str],
    attention: AttentionFn = attend,
) -> int:
    """Bytes that one layer keeps: two layers less one of them, so what all share (angles, input) cancels."""
    start = min(layer, config.model.num_layers - 2)
    if config.model.moe_shortcut:  # after the layer before it: the second of a pair adds what the first's experts give
        start = layer - 1
    other = start + 1 if layer == start else start
    both = saved_bytes(config, range(start, start + 2), dtype, documents, recompute, attention)
    return both - saved_bytes(config, range(other, other + 1), dtype, documents, recompute, attention)


def token_load(config: Config, documents: bool, dtype: torch.dtype) -> TokenLoad:
    return TokenLoad(
        tokens=TOKENS,
        kv_tokens=TOKENS,
        expert_rows=TOKENS
        * config.model.num_experts_per_token
        * config.model.num_experts
        // config.model.num_scored_experts,
        mask_numbers=TOKENS * SEQ_LEN if documents else 0,
        window_numbers=TOKENS * SEQ_LEN,
        number_bytes=dtype.itemsize,
        dispatched=False,
        on_cpu=True,
        copies_groups=False,
    )


LAYERS = [("small_dsv3", 0), ("small_dsv3", 3), ("small_qwen3_moe", 1), ("small_mixtral", 1)]
LAYERS += [("small_gpt_oss", 0), ("small_gpt_oss", 1)]  # with a window, and without
LAYERS += [("small_qwen2_moe", 1), ("small_glm4_moe", 3), ("small_muse", 1)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("documents", [False, True], ids=["one_document", "documents"])
@DTYPES
@pytest.mark.parametrize(("model", "layer"), LAYERS)
def test_a_layer_keeps_what_the_plan_says(model: str, layer: int, dtype: torch.dtype, documents: bool) -> None:
    config = composed(f"model={model}")
    planned = layer_activation_bytes(config.model, layer, token_load(config, documents, dtype))
    # What is left out: a number per token here and there, and rounded copies of small weights.
    measured = layer_bytes(config, layer, dtype, documents, [])
    assert measured == pytest.approx(sum(planned.values()), rel=0.005)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recompute", [[], ["full"], ["layernorm"], ["core_attn", "moe"]])
@pytest.mark.parametrize("ratio", [0, 4, 32])
@DTYPES
@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_of_streams_keeps_what_the_plan_says(
    layer: int, dtype: torch.dtype, ratio: int, recompute: list[str]
) -> None:
    """Its attention without, with few and with many compressed keys, and experts by token id and by scores."""
    overrides = ("model=small_dsv4", f"model.attention.compress_ratios={[ratio] * 4}")
    assert_kept_as_planned(overrides, layer, dtype, recompute, shrinks=0.03)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recompute", [[], ["full"], ["layernorm"], ["core_attn", "moe", "shared_experts"]])
@DTYPES
@pytest.mark.parametrize("layer", [1, 2], ids=["second", "first"])
def test_a_layer_of_a_pair_keeps_what_the_plan_says(layer: int, dtype: torch.dtype, recompute: list[str]) -> None:
    """A third of the choices is of identities."""
    if layer == 1:
        recompute = [{"moe": "mlp", "shared_experts": "mla_up_proj"}.get(name, name) for name in recompute]
    assert_kept_as_planned(("model=small_longcat", "moe.gate=balanced"), layer, dtype, recompute)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("model", "layer"), LAYERS[1:6])
def test_blocks_of_scores_keep_no_mask(model: str, layer: int) -> None:
    """In bfloat16, as CUDA keeps it; torch refuses gradients on the CPU, which its uncompiled form has.

    That form keeps each query's largest score too.
    """
    config, dtype = composed(f"model={model}"), torch.bfloat16
    load = replace(token_load(config, True, dtype), on_cpu=False, flex=True)
    with patch.object(flex_attention, "_validate_device", lambda *heads: None):
        measured = layer_bytes(config, layer, dtype, True, [], attend_in_blocks)
    planned = sum(layer_activation_bytes(config.model, layer, load).values())
    largest = 4 * TOKENS * config.model.attention.num_heads
    assert measured == pytest.approx(planned + largest, rel=0.005)


@DTYPES
@pytest.mark.parametrize(("model", "layer"), LAYERS[1:6])
def test_scores_are_kept_by_math_alone(model: str, layer: int, dtype: torch.dtype) -> None:
    config = composed(f"model={model}")
    load = token_load(config, True, dtype)
    planned, fused = (layer_activation_bytes(config.model, layer, replace(load, scores=kept)) for kept in (True, False))
    measured = layer_bytes(config, layer, dtype, True, [], partial(attend, kernel="math"))
    assert measured == pytest.approx(sum(planned.values()), rel=0.005)
    assert planned["attention"] > fused["attention"]


@pytest.mark.parametrize(("model", "layer"), [("small_qwen3_moe", 1), ("small_gpt_oss", 0)])
def test_grouped_heads_that_cuda_copies_under_a_mask_are_kept_as_planned(model: str, layer: int) -> None:
    """The copy is for CUDA alone; here it is made in front of the CPU's attention."""
    config = composed(f"model={model}")
    load = token_load(config, True, torch.bfloat16)
    planned = layer_activation_bytes(config.model, layer, replace(load, copies_groups=True))

    def copied(q, k, v, *rest):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return attend(q, k, v, *rest)

    measured = layer_bytes(config, layer, torch.bfloat16, True, [], copied)
    assert measured == pytest.approx(sum(planned.values()), rel=0.005)
    plain = layer_activation_bytes(config.model, layer, load)
    assert sum(planned.values()) > 1.02 * sum(plain.values())


def test_the_plan_copies_grouped_heads_for_cuda_and_torchs_choice_alone() -> None:
    for overrides, expected in (
        (["cluster=h100_sxm"], True),
        (["cluster=h100_sxm", "kernels.attention=flash"], False),
        (["cluster=laptop"], False),
    ):
        config = composed(*overrides)
        mesh = resolve_mesh(config.mesh, 8)
        assert TokenLoad.of(config, mesh, plan_batch(config, mesh)).copies_groups == expected


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("model", "layer", "dtype", "recompute"),
    [
        (*layer, dtype, recompute)
        for layer in LAYERS
        for dtype in (torch.float32, torch.bfloat16)
        for recompute in (*RERUN, "full", "layernorm", "all regions")
    ],
    ids=lambda value: str(value).replace("torch.", ""),
)
def test_a_recomputed_layer_keeps_what_the_plan_says(
    model: str, layer: int, dtype: torch.dtype, recompute: str
) -> None:
    names = list(RERUN) if recompute == "all regions" else [recompute]
    assert_kept_as_planned((f"model={model}",), layer, dtype, names)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("more", [[], ["core_attn"], ["layernorm", "core_attn", "shared_experts", "moe", "mlp"]])
@pytest.mark.parametrize("q_lora_rank", ["8", "null"])
@DTYPES
@pytest.mark.parametrize("layer", [0, 3])
def test_up_projections_that_are_made_again_are_not_kept(
    layer: int, dtype: torch.dtype, q_lora_rank: str, more: list[str]
) -> None:
    overrides = ("model=small_dsv3", f"model.attention.q_lora_rank={q_lora_rank}")
    assert_kept_as_planned(overrides, layer, dtype, ["mla_up_proj", *more])


@pytest.mark.parametrize("experts", ["grouped_mm", "loop"])  # tests/moe/test_kernels.py counts for triton
def test_the_experts_activation_is_kept_by_those_that_the_configuration_refuses(experts: str) -> None:
    config = composed("model=small_qwen3_moe", f"moe.experts={experts}")
    rows = TOKENS * config.model.num_experts_per_token
    planned = layer_activation_bytes(config.model, 1, token_load(config, False, torch.float32))
    surplus = layer_bytes(config, 1, torch.float32, False, []) - sum(planned.values())
    activation = 4 * rows * config.model.moe_intermediate_size
    assert (surplus >= activation) == (experts == "loop")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
@pytest.mark.parametrize(("model", "layer"), [("small_dsv3", 0), ("small_dsv3", 3), ("small_qwen3_moe", 1)])
def test_products_in_8_bits_keep_what_others_keep(model: str, layer: int, fp8: str) -> None:
    overrides = (f"model={model}", "model.moe_intermediate_size=128", f"train.fp8={fp8}")
    is_mla = composed(*overrides).model.attention.kind == "mla"
    promised = ["layernorm", "mla_up_proj"] if is_mla else ["layernorm"]
    assert_kept_as_planned(overrides, layer, torch.bfloat16, promised)


def assert_kept_as_planned(
    overrides: tuple[str, ...], layer: int, dtype: torch.dtype, names: list[str], shrinks: float = 0.02
) -> None:
    """Bytes of the layer, and that they shrink by as much as planned."""
    config = composed(*overrides)
    load = token_load(config, True, dtype)

    def planned(names: list[str]) -> float:
        parts = layer_activation_bytes(config.model, layer, load, frozenset(names))
        return sum(parts.values())

    before = bytes_kept(overrides, layer, dtype, ())
    assert before == pytest.approx(planned([]), rel=0.005)
    measured = bytes_kept(overrides, layer, dtype, tuple(names))
    assert measured == pytest.approx(planned(names), abs=0.005 * before)
    assert before - measured == pytest.approx(planned([]) - planned(names), rel=shrinks)


@pytest.mark.parametrize("name", ["moe", "full"])
def test_the_workspace_is_what_the_largest_region_dropped(name: str) -> None:
    model = composed("model=small_qwen3_moe").model
    load = token_load(Config(model=model), True, torch.float32)
    sizes = [
        max(work.recompute for work in layer_workspaces(model, 1, load, frozenset(names), 0, 0))
        for names in ((name,), (name, "core_attn"), ())
    ]
    assert sizes[0] == sizes[1] > 0 and sizes[2] == 0
    whole = sum(layer_activation_bytes(model, 1, load).values())
    kept = sum(layer_activation_bytes(model, 1, load, frozenset((name,))).values())
    assert sizes[0] == whole - kept


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        pytest.param(["linear_key_head_dim=8", "linear_value_head_dim=24"], marks=pytest.mark.exhaustive, id="uneven"),
    ],
)
@pytest.mark.parametrize("recompute", ["", "core_attn"])
@DTYPES
@pytest.mark.parametrize("layer", [0, 3])
def test_a_delta_net_and_a_gated_attention_keep_what_the_plan_says(
    layer: int, dtype: torch.dtype, recompute: str, sizes: list[str]
) -> None:
    overrides = ["model=small_qwen3_next", *(f"model.attention.{size}" for size in sizes)]
    config = composed(*overrides)
    names = [recompute] if recompute else []
    planned = layer_activation_bytes(config.model, layer, token_load(config, False, dtype), frozenset(names))
    measured = layer_bytes(config, layer, dtype, False, names)
    # Of a delta net, the first chunks keep less than later ones.
    assert measured == pytest.approx(sum(planned.values()), rel=0.01)


def test_the_rule_is_cut_into_the_chunks_that_the_plan_counts() -> None:
    assert DELTA_CHUNK == CHUNK


def test_the_head_is_planned_by_the_chunk_and_by_the_vocabulary_that_a_tp_rank_has() -> None:
    model = replace(composed().model, vocab_size=4096)
    short, long = (head_workspace_bytes(model, tokens, 4) for tokens in (CHUNK_TOKENS, 2 * CHUNK_TOKENS))
    before = 4 * CHUNK_TOKENS * model.vocab_size  # the chunk before, which goes when its successor is there
    assert long - short == 3 * 4 * CHUNK_TOKENS * model.hidden_size + before
    rows_of_x = 3 * 4 * CHUNK_TOKENS * model.hidden_size
    assert model.vocab_size % 2 == 0
    cut = head_workspace_bytes(model, CHUNK_TOKENS // 2, 4, tp=2)
    assert cut - rows_of_x == (short - rows_of_x) / 2
    # kernels.loss=triton: logits of two bytes become their gradient, and no float32 copy is made
    wide, narrow = (
        head_workspace_bytes(model, CHUNK_TOKENS, 2, trained=False, in_place=kernels) for kernels in (False, True)
    )
    assert wide - narrow == 4 * CHUNK_TOKENS * model.vocab_size


@pytest.mark.parametrize(("model", "layer"), [("small_qwen3_moe", 1), ("small_dsv3", 0), ("small_dsv3", 3)])
def test_adapters_on_every_matrix_keep_what_is_planned_beside_the_layers_own(model: str, layer: int) -> None:
    plain = composed(f"model={model}")
    lora = replace(plain, lora=LoraConfig(rank=8))

    def kept(config: Config) -> int:
        made = Decoder
        with patch(f"{__name__}.Decoder", lambda *args, **given: adapted(made(*args, **given), config)):
            return saved_bytes(config, range(layer, layer + 1), torch.float32, False, [])

    load = token_load(plain, False, torch.float32)
    more = adapter_activation_bytes(lora, layer, load, frozenset())
    assert more > 0 and kept(lora) == kept(plain) + more


def adapted(part: Decoder, config: Config) -> Decoder:
    freeze_and_adapt(part, config, torch.float32, torch.float32)
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape)))
    return part
