"""Compressed attention against DeepSeek-V4's classes of transformers in float64, and its indexer's loss against a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log, sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from automoe.comm.tokens import MicroBatch
from automoe.config.schema import AttentionConfig, ModelConfig, RopeConfig
from automoe.kernels import compressed_attention as kernels
from automoe.kernels import index_scores
from automoe.model.attention import AttentionSetup
from automoe.model.backend import BackendConfig
from automoe.model.compressed_attention import CompressedAttention
from automoe.model.init import default_dtype, initialize
from automoe.model.params import layer_params
from automoe.passes.trace import training_pass
from tests.support.class_models import AllInFloat64

KINDS = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = [0, 3, 5]
MODEL = ModelConfig(
    hidden_size=24,
    num_layers=3,
    attention=AttentionConfig(
        kind="compressed",
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        q_lora_rank=10,
        qk_rope_head_dim=8,
        sliding_window=4,
        sinks=True,
        o_groups=2,
        o_lora_rank=6,
        index_topk=2,
        index_n_heads=3,
        index_head_dim=12,
        compress_ratios=RATIOS,
        sparse_ratio=RATIOS[1],
        compress_rope_theta=90.0,
    ),
    rope=RopeConfig(
        theta=50.0,
        interleaved=True,
        scaling="yarn",
        factor=4.0,
        original_seq_len=8,
        beta_fast=4.0,
        attention_factor=1.0,
    ),
)
ROWS = 2
DOCUMENTS = [[9, 1, 13, 4], [2, 25]]  # lengths in each row: below, at and above windows; row 0 is the longer one's


def their_config() -> Any:
    from transformers import DeepseekV4Config

    attention = MODEL.attention
    config = DeepseekV4Config(
        hidden_size=MODEL.hidden_size,
        num_hidden_layers=len(KINDS),
        num_attention_heads=attention.num_heads,
        head_dim=attention.head_dim,
        q_lora_rank=attention.q_lora_rank,
        layer_types=list(KINDS),
        compress_rates=dict(zip(KINDS[1:], RATIOS[1:], strict=True)),
        partial_rotary_factor=attention.qk_rope_head_dim / attention.head_dim,
        sliding_window=attention.sliding_window,
        o_groups=attention.o_groups,
        o_lora_rank=attention.o_lora_rank,
        index_n_heads=attention.index_n_heads,
        index_head_dim=attention.index_head_dim,
        index_topk=attention.index_topk,
        rope_theta=MODEL.rope.theta,
        compress_rope_theta=attention.compress_rope_theta,
        rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0),
    )
    config._attn_implementation = "eager"
    return config


def modules(layer: int, **changes: Any) -> tuple[CompressedAttention, torch.nn.Module]:
    """Our module of a layer and theirs, with the same weights."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

    config = replace(MODEL, attention=replace(MODEL.attention, **changes))
    their = their_config()
    for name in {"index_topk"} & changes.keys():
        setattr(their, name, changes[name])
    with AllInFloat64(), default_dtype(torch.float64):
        ours, theirs = CompressedAttention(config, layer, BackendConfig()), DeepseekV4Attention(their, layer)
    generator = torch.Generator().manual_seed(layer)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    ours.load_state_dict({our_name(name): p.detach() for name, p in theirs.named_parameters()}, strict=False)
    assert {name for name, _ in ours.named_parameters()} == {our_name(name) for name, _ in theirs.named_parameters()}
    return ours, theirs


def our_name(name: str) -> str:
    return name.replace("indexer.scorer.", "indexer.")


def setup_of(config: ModelConfig, doc_ids: torch.Tensor | None, size: int) -> AttentionSetup:
    index = torch.arange(size).expand(ROWS, size)
    positions = index
    if doc_ids is not None:
        starts = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
        positions = index - torch.where(starts, index, 0).cummax(1).values
    tokens = MicroBatch(torch.zeros(ROWS, size, dtype=torch.int64), doc_ids=doc_ids, positions=positions)
    counts = tokens.known_counts()
    per_token = tokens.per_token(counts.non_padding)
    return AttentionSetup(config, per_token, BackendConfig(), torch.float64, range(len(RATIOS)))


def their_output(theirs: Any, x: torch.Tensor) -> torch.Tensor:
    """Output of transformers' module for rows of one document."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    size, window = x.shape[1], theirs.sliding_window
    positions = torch.arange(size).expand(len(x), size)
    rotary = DeepseekV4RotaryEmbedding(theirs.config)
    angles = {kind: rotary(x, positions, kind) for kind in ("main", "compress")}
    hidden = torch.ones(size, size, dtype=torch.bool)
    seen = hidden.tril() & hidden.triu(1 - window)
    mask = torch.zeros(len(x), 1, size, size, dtype=x.dtype).masked_fill(~seen, -torch.inf)
    return theirs(x, angles, positions, mask)[0]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


def compare_gradients(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    own = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "indexer" in name:  # learns from a loss that transformers does not have
            assert parameter.grad is None and own[our_name(name)].grad is None
        elif parameter.grad is None or not parameter.grad.any():  # no row is as long as a window
            assert "compressor" in name and not own[name].grad.any()
        else:
            assert relative(own[name].grad, parameter.grad) < 1e-12, name


def random_states(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(ROWS, size, MODEL.hidden_size, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), grad


@pytest.mark.parametrize("size", [2, 3, 14, 15, 23])
@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_rows_of_one_document_are_those_of_transformers(layer: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients of the input and of all weights; rows shorter than a window, whole windows, and a rest."""
    monkeypatch.setattr(kernels, "CHUNK", 6)  # chunks that end within windows, the last of them shorter
    ours, theirs = modules(layer)
    ours.eval()
    x, grad = random_states(size)
    with AllInFloat64():
        wanted = their_output(theirs, x)
        (wanted_x,) = torch.autograd.grad(wanted, x, grad, retain_graph=True)
        wanted.backward(grad, inputs=list(theirs.parameters()))
        found = ours(x, setup_of(MODEL, None, size))
        (found_x,) = torch.autograd.grad(found, x, grad, retain_graph=True)
        found.backward(grad, inputs=list(ours.parameters()))
    assert relative(found, wanted) < 1e-12
    assert relative(found_x, wanted_x) < 1e-12
    compare_gradients(ours, theirs)


def test_scores_of_an_indexer_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scale counts too: the loss of an indexer depends on it, unlike its choice."""
    ours, theirs = modules(1)
    scores: list[torch.Tensor] = []
    theirs.compressor.indexer.scorer.register_forward_hook(lambda module, given, result: scores.append(result))
    indexer = ours.compressor.indexer
    given: list[Any] = []
    choose = indexer.choose
    monkeypatch.setattr(indexer, "choose", lambda inputs, seen: given.append(inputs) or choose(inputs, seen))
    x, _ = random_states(23)
    with AllInFloat64(), torch.no_grad():
        their_output(theirs, x)
        ours(x, setup_of(MODEL, None, 23))
    q, k, w = given[0]
    assert relative(index_scores.index_scores(q, k, w)[0], scores[0]) < 1e-12


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
@pytest.mark.parametrize("chunk", [7, 256])
def test_packed_documents_are_each_alone(layer: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows start with each document: output and gradients are those of transformers' class for the documents."""
    monkeypatch.setattr(kernels, "CHUNK", chunk)
    ours, theirs = modules(layer)
    ours.eval()
    size = max(map(sum, DOCUMENTS)) + 2
    x, grad = random_states(size)
    doc_ids = torch.full((ROWS, size), -1)
    wanted = torch.zeros_like(x)
    with AllInFloat64():
        for row, lengths in enumerate(DOCUMENTS):
            start = 0
            for number, length in enumerate(lengths):
                place = slice(start, start + length)
                doc_ids[row, place] = number
                out = their_output(theirs, x[row : row + 1, place])
                out.backward(grad[row : row + 1, place])
                wanted[row, place] = out[0].detach()
                start += length
        wanted_x, x.grad = x.grad, None
        valid = (doc_ids >= 0).unsqueeze(-1)
        found = ours(x, setup_of(MODEL, doc_ids, size))
        found.backward(grad * valid)
    assert relative(found * valid, wanted) < 1e-12
    assert relative(x.grad, wanted_x) < 1e-12
    compare_gradients(ours, theirs)


def test_the_table_has_the_parameters_of_each_layer() -> None:
    for layer in range(3):
        with default_dtype(torch.float64):
            built = CompressedAttention(MODEL, layer, BackendConfig())
        prefix = f"layers.{layer}.self_attn."
        listed = {
            param.name.removeprefix(prefix): param.shape
            for param in layer_params(MODEL, layer)
            if param.name.startswith(prefix)
        }
        assert listed == {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
        initialize(built, 0.02, seed=1)
        zeros = {name for name, parameter in built.named_parameters() if not parameter.any()}
        assert zeros == {name for name in listed if name.endswith(("sinks", "position_bias"))}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run a layer with an indexer in a training pass, and return what its indexer's loss was given."""
    seen: dict[str, Any] = {}

    def run(ours: CompressedAttention, x: torch.Tensor, setup: AttentionSetup, grad: torch.Tensor) -> dict[str, Any]:
        indexer = ours.compressor.indexer
        loss = indexer.loss

        def keep(inputs, chosen, q, k, scale, setup):
            seen.update(inputs=inputs, chosen=chosen, q=q.detach(), k=k.detach(), scale=scale)
            return loss(inputs, chosen, q, k, scale, setup)

        monkeypatch.setattr(indexer, "loss", keep)
        with training_pass():
            ours(x, setup).backward(grad, retain_graph=True)
        return seen

    return run


@pytest.mark.parametrize("warmup", [False, True])
def test_an_indexer_learns_the_shares_of_the_entries(
    warmup: bool, watched: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss and gradients are those of a loop over the formula; a query without a complete window counts as zero."""
    monkeypatch.setattr(index_scores, "CHUNK", 5)
    ours, _ = modules(1)
    indexer = ours.compressor.indexer
    indexer.warmup = warmup
    size, documents = 26, [[10, 14], [26]]
    ids = torch.tensor(
        [sum(([n] * length for n, length in enumerate(row)), []) + [-1] * (26 - sum(row)) for row in documents]
    )
    setup = setup_of(MODEL, ids, size)
    x, grad = random_states(size)
    given = watched(ours, x, setup, grad)
    q, k, w = given["inputs"]
    total, count = torch.zeros((), dtype=torch.float64), int((ids >= 0).sum())
    positions, ratio = setup.tokens.positions, RATIOS[1]
    for row in range(ROWS):
        ends = [place for place in range(size) if ids[row, place] >= 0 and (positions[row, place] + 1) % ratio == 0]
        for place in range(size):
            visible = [n for n, end in enumerate(ends) if end <= place and ids[row, end] == ids[row, place]]
            score = {
                n: sum(w[row, place, j] * torch.relu(q[row, place, j] @ k[row, n]) for j in range(w.shape[-1]))
                for n in visible
            }
            kept = given["chosen"][row, place].nonzero().flatten().tolist()
            assert set(kept) <= set(visible)
            assert len(kept) == (len(visible) if warmup else min(MODEL.attention.index_topk, len(visible)))
            left = [float(score[n].detach()) for n in visible if n not in kept]
            assert not left or max(left) <= min(float(score[n].detach()) for n in kept)
            if not kept or ids[row, place] < 0:
                continue
            target = torch.zeros(len(kept), dtype=torch.float64)
            for head in range(MODEL.attention.num_heads):
                logits = torch.stack([given["q"][row, place, head] @ given["k"][row, n, 0] for n in kept])
                target += (logits * given["scale"]).softmax(0)
            target = target / target.sum()
            shares = torch.stack([score[n] for n in kept]).softmax(0)
            total = total + sum(t * (log(float(t)) - s.log()) for t, s in zip(target, shares, strict=True)) / count
    value = float(total.detach())
    assert value > 1e-3 and abs(float(indexer.loss_sum) - value) < 1e-12 * value
    names, own = zip(*indexer.named_parameters(), strict=True)
    for name, parameter, wanted in zip(names, own, torch.autograd.grad(total, own), strict=True):
        assert wanted.norm() > 1e-6, name
        assert relative(parameter.grad, wanted) < 1e-12, name


def test_an_indexer_changes_no_other_gradient() -> None:
    ours, _ = modules(1)
    x, grad = random_states(20)
    setup = setup_of(MODEL, None, 20)
    both = torch.autograd.grad(ours(x, setup), [x, ours.q_b_proj.weight, ours.compressor.kv_proj.weight], grad)
    ours.compressor.indexer.requires_grad_(False)
    alone = torch.autograd.grad(ours(x, setup), [x, ours.q_b_proj.weight, ours.compressor.kv_proj.weight], grad)
    assert all(torch.equal(one, other) for one, other in zip(both, alone, strict=True))


@pytest.mark.parametrize("overlaps", [False, True])
def test_gates_and_scores_are_computed_in_float32(overlaps: bool) -> None:
    """In bfloat16 sums and softmax round once: errors stay near those of the rounded result."""
    generator = torch.Generator().manual_seed(3)
    size, width, dim = 64, 4, 16

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    kv, gate = random(1, size, dim * (1 + overlaps)), random(1, size, dim * (1 + overlaps), scale=8.0)
    bias = torch.randn(width, dim * (1 + overlaps), generator=generator)
    windows = kernels.windows_of(torch.arange(size)[None], None, width)
    pooled = kernels.pool_windows(kv, gate, bias, windows, overlaps)
    exact = kernels.pool_windows(kv.double(), gate.double(), bias.double(), windows, overlaps)
    assert pooled.dtype == torch.bfloat16 and ((pooled - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
    q, positions = random(1, size, 2, dim, scale=4.0), random(1, size, dim, scale=4.0)
    sinks = torch.tensor([0.3, 5.7])
    args = windows.seen_BSE, sinks, None, 8, 1 / sqrt(dim)
    found = kernels.attend_entries(q, positions, pooled, *args)
    exact = kernels.attend_entries(q.double(), positions.double(), pooled.double(), *args)
    assert found.dtype == torch.bfloat16 and relative(found, exact) < 2**-8
