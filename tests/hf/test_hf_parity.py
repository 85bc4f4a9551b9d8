"""Logits, cross-entropy and every gradient against ``transformers``, from the same checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from automoe.comm.tokens import IGNORE, MicroBatch
from automoe.config.schema import MoEConfig
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.read import load_hf
from automoe.model.decoder import Decoder
from automoe.model.init import default_dtype
from automoe.parallel.parallelize import build_decoder
from tests.support.class_models import AllInFloat64
from tests.support.hf_models import SMALL_MODELS, as_our_tensor, hf_model_of, save_small_hf, text_parameters

TOLERANCE = 1e-5
ROWS, SEQ = 3, 40


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).norm() / theirs.norm())


def load(path: Path, experts: str = "loop", dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_decoder(model_config_from_hf(path), MoEConfig(experts=experts), dtype)
    model.to_empty(device="cpu")
    load_hf(model, path)
    return model.train()


def tokens_and_labels(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab_size, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat((tokens[:, 1:], torch.full((ROWS, 1), IGNORE)), dim=1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "qwen3_5_moe_odd" else pytest.mark.exhaustive) for name in SMALL_MODELS],
)
def test_equal_in_float64(name: str, tmp_path: Path) -> None:
    """Of what transformers computes in float32 the same in float64, loss and every gradient are equal to 1e-12."""
    save_small_hf(name, tmp_path)
    with AllInFloat64():
        hf = hf_model_of(tmp_path, dtype=torch.float64, experts_implementation="eager")
    with default_dtype(torch.float64):
        model = Decoder(model_config_from_hf(tmp_path), MoEConfig(experts="loop"))
    load_hf(model, tmp_path)
    tokens, labels = tokens_and_labels(model.config.vocab_size)
    with AllInFloat64():
        logits = hf(tokens).logits
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        expected.backward()
        with torch.no_grad():
            assert relative(model.eval()(tokens), logits) < 1e-12
        loss = model.train()(batch=MicroBatch(tokens, labels=labels)).sum()
        loss.backward()
    assert abs(loss.item() - expected.item()) < 1e-12 * expected.item()
    theirs = {key: parameter.grad for key, parameter in text_parameters(hf).items()}
    with default_dtype(torch.float64):
        for ours, parameter in with_gradients(model, theirs):
            wanted = as_our_tensor(ours, parameter.shape, theirs, model.config)
            assert relative(parameter.grad, wanted) < 1e-12, ours


def with_gradients(model: Decoder, theirs: dict[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Our parameters but those of indexers, which learn from a loss that transformers does not have."""
    keys = family_of(model.config).keys.in_memory
    for name, parameter in model.named_parameters():
        if ".indexer." not in name:
            yield name, parameter
            continue
        assert all(theirs[piece.key] is None for piece in keys.pieces(name, tuple(parameter.shape)))
        assert parameter.grad.isfinite().all() and parameter.grad.norm() > 0  # tests/model/test_indexer.py has numbers


@pytest.mark.parametrize("family", ["dsv32", "glm_moe_dsa"])
@pytest.mark.parametrize("topk", [1, 39, 40, 41])
def test_one_key_a_query_and_about_as_many_as_a_row_has(family: str, topk: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_small_hf(family, tmp_path, other_sizes={"index_topk": topk, "index_n_heads": 1})
    tokens, _ = tokens_and_labels(96)
    with AllInFloat64(), default_dtype(torch.float64), torch.no_grad():
        hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
        model = Decoder(model_config_from_hf(tmp_path), MoEConfig(experts="loop"))
        load_hf(model, tmp_path)
        for rows in (tokens, tokens[:, : SEQ // 3]):
            assert relative(model.eval()(rows), hf(rows).logits) < 1e-12


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SMALL_MODELS)
@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
def test_equal_to_transformers(name: str, fused: bool, tmp_path: Path) -> None:
    hf = save_small_hf(name, tmp_path, save_original_format=not fused)
    model = load(tmp_path)
    tokens, labels = tokens_and_labels(model.config.vocab_size)

    their_logits = hf(tokens).logits
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    their_loss.backward()
    with torch.no_grad():
        assert relative(model(tokens), their_logits) < TOLERANCE
    loss = model(batch=MicroBatch(tokens, labels=labels)).sum()
    loss.backward()
    assert abs(loss.item() - their_loss.item()) < TOLERANCE * their_loss.item()
    theirs = {key: parameter.grad for key, parameter in text_parameters(hf).items()}
    for ours, parameter in with_gradients(model, theirs):
        wanted = as_our_tensor(ours, parameter.shape, theirs, model.config)
        assert wanted.norm() > 0
        # a factor of all streams of all tokens: the terms of its gradient cancel
        most = 10 * TOLERANCE if ours.endswith(("_residual.scale", "hc_head.hc_scale")) else TOLERANCE
        assert relative(parameter.grad, wanted) < most, ours
