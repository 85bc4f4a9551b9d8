"""Routing against a slow float64 reference, one token at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from automoe.comm.tokens import MicroBatch, Tokens
from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.moe.router import Router, routing_probs, select_experts

pytestmark = pytest.mark.usefixtures("trains")

B, S, H, E = 2, 12, 16, 12


def make_rows(padding: int = 0, forced_ids: torch.Tensor | None = None) -> Tokens:
    index = torch.arange(S).expand(B, S)
    doc_ids = torch.zeros(B, S, dtype=torch.int64)
    if padding:
        doc_ids[-1, -padding:] = -1
    return Tokens(index, index, doc_ids, torch.tensor(B * S - padding), forced_ids)


def make_router(config: RouterConfig, top_k: int = 3, dtype: torch.dtype = torch.float64, **moe) -> Router:
    model = ModelConfig(num_experts=E, num_experts_per_token=top_k, hidden_size=H, router=config)
    router = Router(model, MoEConfig(**moe), moe_index=0)
    generator = torch.Generator().manual_seed(1)
    router.weight = torch.nn.Parameter(torch.randn(E, H, generator=generator, dtype=torch.float64).to(dtype))
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(E, generator=generator) / 4)
    return router


def hidden_states(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, S, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def route_one(x: list[float], router: Router) -> tuple[list[int], list[float], list[int]]:
    """One token in plain Python: chosen experts, their weights, plain top-k."""
    config, k = router.config, router.top_k
    logits = [sum(a * b for a, b in zip(row, x, strict=True)) for row in router.weight.tolist()]
    if config.score == "softmax":
        top = max(logits)
        total = sum(math.exp(z - top) for z in logits)
        scores = [math.exp(z - top) / total for z in logits]
    else:
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    bias = [0.0] * E if router.expert_bias is None else router.expert_bias.tolist()
    biased = [s + b for s, b in zip(scores, bias, strict=True)]

    size = E // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    strength = [sum(sorted((biased[e] for e in g), reverse=True)[: config.group_score_topk]) for g in groups]
    best = sorted(range(len(groups)), key=lambda g: -strength[g])[: config.topk_groups]
    if config.num_groups == 1:
        best = [0]
    allowed = [e for g in best for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: -biased[e])[:k]
    weights = [scores[e] for e in chosen]
    if config.norm_topk_prob:
        weights = [w / sum(weights) for w in weights]
    return (chosen, [w * config.routed_scaling_factor for w in weights], sorted(range(E), key=lambda e: -scores[e])[:k])


CONFIGS = {
    "mixtral, qwen3": RouterConfig(),
    "softmax, not renormalised": RouterConfig(norm_topk_prob=False),
    "sigmoid": RouterConfig(score="sigmoid"),
    "sigmoid with bias": RouterConfig(score="sigmoid", expert_bias=True),
    "deepseek": RouterConfig(
        score="sigmoid", expert_bias=True, num_groups=4, topk_groups=2, routed_scaling_factor=2.5
    ),
    "groups by their best expert": RouterConfig(score="softmax", num_groups=3, topk_groups=1, group_score_topk=1),
    "groups by all their experts": RouterConfig(score="sigmoid", num_groups=2, topk_groups=1, group_score_topk=6),
    "biased, not renormalised": RouterConfig(expert_bias=True, norm_topk_prob=False, routed_scaling_factor=0.5),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_routing_is_that_of_the_reference(config: RouterConfig) -> None:
    router, x = make_router(config), hidden_states()
    routing = router(x, make_rows())
    bias_or_groups_mattered = False
    for b in range(B):
        for s in range(S):
            chosen, weights, plain = route_one(x[b, s].tolist(), router)
            assert routing.topk_expert_ids[b, s].tolist() == chosen
            assert routing.plain_ids[b, s].tolist() == plain
            assert routing.topk_probs[b, s].tolist() == pytest.approx(weights, rel=1e-12)
            bias_or_groups_mattered |= chosen != plain
    assert bias_or_groups_mattered == (config.expert_bias or config.num_groups > 1)


def test_the_bias_selects_and_does_not_weigh() -> None:
    config = RouterConfig(score="sigmoid", expert_bias=True)
    scores = torch.linspace(0.1, 0.9, E, dtype=torch.float64)
    bias = torch.zeros(E)
    bias[0] = 10.0
    ids = select_experts(scores, bias, config, 2)
    assert ids.tolist() == [0, E - 1]
    assert routing_probs(scores, ids, config).tolist() == pytest.approx([0.1, 0.9])


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_chosen_scores_that_all_vanish_give_weights_of_zero_and_not_nan(score: str) -> None:
    """A bias may choose experts of which a softmax leaves nothing."""
    config = RouterConfig(score=score, expert_bias=score == "softmax")
    weights = routing_probs(torch.zeros(E), torch.tensor([0, 1]), config)
    assert weights.tolist() == [0.0, 0.0]


def test_scores_are_computed_in_float32_from_bfloat16() -> None:
    router = make_router(RouterConfig(), dtype=torch.bfloat16)
    x = hidden_states(torch.bfloat16)
    routing = router(x, make_rows())
    exact = (x.double() @ router.weight.detach().double().T).softmax(-1)
    assert routing.topk_probs.dtype == torch.float32
    expected = routing_probs(exact, routing.topk_expert_ids, router.config)
    torch.testing.assert_close(routing.topk_probs.double(), expected, rtol=1e-5, atol=0)


def test_float64_stays_float64() -> None:
    assert make_router(RouterConfig())(hidden_states(), make_rows()).topk_probs.dtype == torch.float64


@pytest.mark.parametrize("top_k", [1, 2, 3, 12])
def test_the_balanced_gate_is_exactly_balanced(top_k: int) -> None:
    router = make_router(RouterConfig(), top_k, gate="balanced")
    routing = router(hidden_states(), make_rows())
    assert torch.bincount(routing.topk_expert_ids.flatten(), minlength=E).tolist() == [B * S * top_k // E] * E
    assert all(len(set(ids)) == top_k for ids in routing.topk_expert_ids.flatten(0, 1).tolist())
    assert torch.equal(router.load.totals[:E], torch.full((E,), B * S * top_k / E, dtype=torch.float64))


def test_the_balanced_gate_depends_on_the_place_in_the_row_alone() -> None:
    """A rank that holds every other position of the row must choose as the whole row does there."""
    router = make_router(RouterConfig(), gate="balanced")
    x, rows = hidden_states(), make_rows()
    ids = router(x, rows).topk_expert_ids
    part = replace(rows, index=rows.index[:, 1::2], doc_ids=rows.doc_ids[:, 1::2])
    assert torch.equal(router(x[:, 1::2], part).topk_expert_ids, ids[:, 1::2])


@pytest.mark.parametrize("policy", ["position", "probs"])
def test_a_rank_drops_the_last_positions_of_every_row_and_not_its_last_rows(policy: str) -> None:
    """As Megatron-Core, whose tokens are ordered [S, B]. Weights are equal here, so ``probs`` ends in the same order."""
    router = make_router(RouterConfig(), gate="one_hot", capacity_factor=2.0, drop_policy=policy)
    with torch.no_grad():
        router.weight.zero_()
    kept = router(hidden_states(), make_rows()).kept
    assert kept is not None
    assert kept.tolist() == [[[s < 6] * 3 for s in range(S)]] * B  # an expert takes 2.0 * 24 * 3 / 12 = 12 choices


def test_forced_choices_are_taken_and_weighed_by_own_scores() -> None:
    router, x = make_router(RouterConfig()), hidden_states()
    forced = torch.randint(0, E, (B, S, 1, 2, 3), generator=torch.Generator().manual_seed(3))
    routing = router(x, make_rows(forced_ids=forced))
    assert torch.equal(routing.topk_expert_ids, forced[:, :, 0, 0]) and torch.equal(
        routing.plain_ids, forced[:, :, 0, 1]
    )
    scores = (x @ router.weight.T).softmax(-1)
    torch.testing.assert_close(routing.topk_probs, routing_probs(scores, routing.topk_expert_ids, router.config))


def test_padding_is_not_counted_and_evaluation_counts_nothing() -> None:
    router, x = make_router(RouterConfig()), hidden_states()
    routing = router(x, make_rows(padding=5))
    valid = make_rows(padding=5).valid
    assert (
        router.load.totals[:E].tolist()
        == torch.bincount(routing.topk_expert_ids[valid].flatten(), minlength=E).tolist()
    )
    before = router.load.totals.clone()
    router.eval()
    router(x, make_rows())
    with torch.no_grad():
        router.train()(x, make_rows())
    assert torch.equal(router.load.totals, before)


def test_micro_batches_add_up() -> None:
    router, x = make_router(RouterConfig(), seq_balance_coef=0.1, global_balance_coef=0.2), hidden_states()
    router(x, make_rows())
    whole = router.load.totals.clone()
    router.load.reset_buffers()
    rows = make_rows()
    for b in range(B):
        one = replace(rows, index=rows.index[b : b + 1], doc_ids=rows.doc_ids[b : b + 1])
        router(x[b : b + 1], one)
    torch.testing.assert_close(router.load.totals, whole, rtol=1e-13, atol=0)


def test_padding_is_what_is_said_to_be_else_what_has_no_document() -> None:
    tokens = make_rows(padding=5)
    expected = torch.arange(B * S).view(B, S) < B * S - 5
    assert torch.equal(replace(tokens, not_padding=None).valid, expected)
    assert torch.equal(replace(tokens, doc_ids=None, not_padding=expected).valid, expected)
    assert replace(tokens, doc_ids=None, not_padding=None).valid.all()
    ids, count = expected.long(), B * S - 5
    for given, counted in ({}, B * S), ({"not_padding": expected}, count), ({"doc_ids": ids - 1}, count):
        assert MicroBatch(ids, **given).known_counts().non_padding == counted, "what balance losses are divided by"


def test_a_softmax_with_a_bias_is_divided_by_no_less_than_transformers_divides_by() -> None:
    """Experts that the bias chose may have almost no share: ERNIE's class divides by at least 1e-12."""
    config = RouterConfig(score="softmax", norm_topk_prob=True, expert_bias=True)
    shares = torch.tensor([3e-14, 7e-14, 1.0], dtype=torch.float64)
    few = routing_probs(shares, torch.tensor([0, 1]), config)
    assert few.tolist() == pytest.approx([0.03, 0.07], rel=1e-12)
    assert routing_probs(shares, torch.tensor([1, 2]), config).sum().item() == pytest.approx(1, rel=1e-12)


def test_a_table_of_token_ids_selects_experts_and_no_loss_balances_them() -> None:
    """Scores weight what the table says; layers after the first ``num_hash_layers`` have none."""
    config = RouterConfig(score="sqrt_softplus", expert_bias=True, routed_scaling_factor=1.5, num_hash_layers=1)
    router, x = (
        make_router(config, seq_balance_coef=1.0, micro_batch_balance_coef=1.0, z_loss_coef=0.0),
        hidden_states(),
    )
    table = router.tid2eid
    assert router.expert_bias is None and table is not None and table.dtype == torch.int64
    counts = table.flatten().bincount(minlength=E)
    assert counts.max() - counts.min() <= 1 and all(len(set(row)) == 3 for row in table.tolist())
    generator = torch.Generator().manual_seed(3)
    table.copy_(torch.rand(len(table), E, generator=generator).topk(3).indices)
    ids = torch.randint(len(table), (B, S), generator=generator)
    routing = router(x.requires_grad_(), replace(make_rows(), ids=ids))
    assert torch.equal(routing.topk_expert_ids, table[ids]) and torch.equal(routing.plain_ids, table[ids])
    scores = (1 + (x @ router.weight.T).exp()).log().sqrt().gather(-1, table[ids])
    torch.testing.assert_close(routing.topk_probs, 1.5 * scores / scores.sum(-1, keepdim=True))
    (gradient,) = torch.autograd.grad(routing.topk_probs.sum(), router.weight)
    assert gradient.norm() < 1e-12  # the weights sum to 1.5, and no balance loss adds to them
    model = ModelConfig(num_experts=E, num_experts_per_token=3, hidden_size=H, router=config)
    later = Router(model, MoEConfig(), moe_index=1)
    assert later.tid2eid is None and later.expert_bias is not None
