"""Input noise of the router, router dtype and ties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.moe.router import Router, topk_indices

B, S, H, E, K = 2, 64, 32, 8, 2


def make_rows(first_row: int = 0) -> Tokens:
    index = torch.arange(S).expand(B, S)
    row_ids = torch.arange(first_row, first_row + B).unsqueeze(1).expand(B, S)
    return Tokens(index, index, None, torch.tensor(B * S), row_ids=row_ids)


def make_router(moe_index: int = 0, seed: int = 0, **moe: object) -> Router:
    router = Router(ModelConfig(hidden_size=H, num_experts=E), MoEConfig(**moe), moe_index)
    generator = torch.Generator().manual_seed(1)
    router.weight = torch.nn.Parameter(torch.randn(E, H, generator=generator))
    router.seed = seed
    return router


def jitter(rows: Tokens, moe_index: int = 0, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    router = make_router(moe_index, seed, router_jitter=0.1)
    return router._jitter(torch.ones(*rows.index.shape, H, dtype=dtype), rows)


def test_jitter_is_uniform_around_one() -> None:
    factors = jitter(make_rows())
    assert 0.9 < factors.min() < 0.902 and 1.098 < factors.max() < 1.1
    assert factors.mean().item() == pytest.approx(1, abs=2e-3)
    assert factors.var().item() == pytest.approx(0.2**2 / 12, rel=0.05)


def test_jitter_is_another_one_for_every_token_row_dimension_layer_and_seed() -> None:
    factors = jitter(make_rows())
    assert len(factors.unique()) > 0.999 * factors.numel()
    for other in (jitter(make_rows(first_row=B)), jitter(make_rows(), moe_index=1), jitter(make_rows(), seed=1)):
        assert (other == factors).double().mean() < 1e-3


def test_jitter_of_a_part_is_that_of_the_whole() -> None:
    rows = make_rows()
    part = replace(rows, index=rows.index[1:, ::3], row_ids=rows.row_ids[1:, ::3])
    assert torch.equal(jitter(part), jitter(rows)[1:, ::3])


def test_jitter_is_the_same_number_in_every_dtype() -> None:
    exact = jitter(make_rows())
    torch.testing.assert_close(jitter(make_rows(), dtype=torch.float32).double(), exact, rtol=1e-7, atol=0)


def test_jitter_is_for_training_alone_and_may_move_a_choice() -> None:
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(2))
    plain, noisy = make_router()(x, make_rows()), make_router(router_jitter=0.3)
    assert not torch.equal(noisy(x, make_rows()).topk_expert_ids, plain.topk_expert_ids)
    assert torch.equal(noisy.eval()(x, make_rows()).topk_probs, plain.topk_probs)


def test_bfloat16_logits_are_an_option_and_scores_stay_in_float32() -> None:
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    wide, narrow = make_router()(x, make_rows()), make_router(router_dtype="bfloat16")(x, make_rows())
    assert narrow.topk_probs.dtype == wide.topk_probs.dtype == torch.float32
    assert not torch.equal(narrow.topk_probs, wide.topk_probs)
    torch.testing.assert_close(narrow.topk_probs.sum(-1), torch.ones(B, S))
    assert (narrow.topk_expert_ids == wide.topk_expert_ids).double().mean() > 0.9
    double = make_router(router_dtype="bfloat16")(x.double(), make_rows())
    assert double.topk_probs.dtype == torch.float64, "at least: float64 stays"


def test_exact_ties_go_to_the_lowest_index() -> None:
    scores = torch.zeros(1, 1, 1000)
    scores[..., 700] = 1
    assert topk_indices(scores, 4, exact_ties=True).tolist() == [[[700, 0, 1, 2]]]
    router = Router(
        ModelConfig(
            hidden_size=H,
            num_experts=E,
            num_experts_per_token=K,
            router=RouterConfig(score="sigmoid", num_groups=4, topk_groups=2, exact_ties=True),
        ),
        MoEConfig(),
        0,
    )
    router.weight = torch.nn.Parameter(torch.zeros(E, H))
    assert router(torch.ones(B, S, H), make_rows()).topk_expert_ids.unique(dim=1).tolist() == [[[0, 1]]] * B
