"""Every routing and dropping option, in any combination, against plain Python."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import routing_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.model.backend import BackendConfig
from automoe.model.block import Latent
from automoe.moe.balance import LOSSES
from automoe.moe.capacity import expert_capacity, rank_within_expert
from automoe.moe.layer import MoE
from automoe.moe.router import Router
from automoe.passes.trace import training_pass

COEF = 0.5


@st.composite
def model_configs(draw: st.DrawFn, num_experts: tuple[int, ...] = (1, 2, 4, 6, 8, 12)) -> ModelConfig:
    """Router options that are valid together; the router's weight may be set to the identity (H = E)."""
    experts = draw(st.sampled_from(num_experts))
    num_groups = draw(st.sampled_from([n for n in (1, 2, 4) if experts % n == 0]))
    topk_groups = draw(st.integers(1, num_groups))
    group = experts // num_groups
    top_k = draw(st.integers(1, min(4, topk_groups * group if num_groups > 1 else experts)))
    score = draw(st.sampled_from(["softmax", "sigmoid", "sqrt_softplus"]))
    after = score == "softmax" and draw(st.booleans())
    zeros = draw(st.integers(0, 3)) if num_groups == 1 else 0
    router = RouterConfig(
        score=score,
        softmax_after_topk=after,
        norm_topk_prob=after or draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score_topk=draw(st.integers(1, group)),
        expert_bias=draw(st.booleans()),
        exact_ties=draw(st.booleans()),
        num_zero_experts=zeros,
    )
    return ModelConfig(
        hidden_size=experts + zeros,
        num_experts=experts,
        num_experts_per_token=top_k,
        moe_intermediate_size=3,
        router=router,
    )


def drops() -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {
            "capacity_factor": st.sampled_from([0.3, 0.75, 1.0, 1.25, 2.0]),
            "drop_policy": st.sampled_from(["probs", "position"]),
            "drop_scope": st.sampled_from(["rank", "sequence"]),
        }
    )


def make_rows(batch: int, size: int, padding: int) -> Tokens:
    index = torch.arange(size).expand(batch, size)
    doc_ids = torch.zeros(batch, size, dtype=torch.int64)
    doc_ids[-1, size - padding :] = -1
    row_ids = torch.arange(batch).unsqueeze(1).expand(batch, size)
    return Tokens(index, index, doc_ids, torch.tensor(batch * size - padding), row_ids=row_ids)


def draw_tokens(shape: tuple[int, ...], seed: int, ties: bool) -> torch.Tensor:
    """Normal numbers; with ``ties`` on so coarse a grid that experts often tie."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 2).round() / 2 if ties else x


@settings(deadline=None, max_examples=80)
@given(
    model=model_configs(),
    moe=st.one_of(st.just({}), drops()),
    batch=st.integers(1, 3),
    size=st.integers(1, 8),
    padding=st.integers(0, 7),
    seed=st.integers(0, 1000),
)
def test_the_router_is_the_reference(
    model: ModelConfig, moe: dict, batch: int, size: int, padding: int, seed: int
) -> None:
    config, experts, k = model.router, model.num_scored_experts, model.num_experts_per_token
    losses = dict(seq_balance_coef=COEF, micro_batch_balance_coef=COEF, z_loss_coef=COEF)
    router = Router(model, MoEConfig(**losses, **moe), moe_index=0)
    router.weight = torch.nn.Parameter(torch.eye(experts, dtype=torch.float64))
    if router.expert_bias is not None:
        router.expert_bias.copy_(draw_tokens((experts,), seed + 1, config.exact_ties))
    rows = make_rows(batch, size, min(padding, size - 1))
    x = draw_tokens((batch, size, experts), seed, config.exact_ties)
    with training_pass():
        routing = router(x, rows)

    bias = None if router.expert_bias is None else router.expert_bias.tolist()
    routed = [[reference.route(token, bias, config, k) for token in row] for row in x.tolist()]
    for b, s in [(b, s) for b in range(batch) for s in range(size)]:
        ids, weights, plain, _ = routed[b][s]
        assert routing.topk_expert_ids[b, s].tolist() == ids
        assert routing.plain_ids[b, s].tolist() == plain
        assert routing.topk_probs[b, s].tolist() == pytest.approx(weights, rel=1e-12, abs=1e-300)

    valid = rows.valid.tolist()
    tokens = [(b, s) for b in range(batch) for s in range(size) if valid[b][s]]

    def balance(group: list[tuple[int, int]]) -> float:
        """E sum_e f_e P_e over the tokens of a group, weighted by its size."""
        n = len(group)
        f = [sum(routed[b][s][2].count(e) for b, s in group) / (k * n) for e in range(experts)]
        p = [sum(routed[b][s][3][e] for b, s in group) / n for e in range(experts)]
        return experts * sum(fe * pe for fe, pe in zip(f, p, strict=True)) * n / len(tokens)

    z = [math.log(sum(math.exp(v) for v in x[b, s].tolist())) ** 2 for b, s in tokens]
    expected = {
        "seq_balance_loss": sum(balance([t for t in tokens if t[0] == b]) for b in range(batch)),
        "global_balance_loss": 0.0,
        "micro_batch_balance_loss": balance(tokens),
        "z_loss": sum(z) / len(tokens),
    }
    totals = router.load.totals.tolist()
    assert totals[2 * experts : -3] == pytest.approx([COEF * expected[name] for name in LOSSES], rel=1e-10)

    if not moe:
        assert routing.kept is None
        return
    assert routing.kept is not None
    # The tokens of a rank by position and then by row; of a row by position.
    by_position = moe["drop_scope"] == "rank"
    order = (
        [(b, s) for s in range(size) for b in range(batch)] if by_position else list(product(range(batch), range(size)))
    )
    # The router's own weights: rounding must not decide between choices that tie.
    flat = [
        (expert, weight, valid[b][s])
        for b, s in order
        for expert, weight in zip(
            routing.topk_expert_ids[b, s].tolist(), routing.topk_probs[b, s].tolist(), strict=True
        )
    ]
    group = batch * size if by_position else size
    capacity = min(math.ceil(Fraction(repr(moe["capacity_factor"])) * group * k / experts), group)
    kept: list[bool] = []
    for start in range(0, len(flat), group * k):
        kept += reference.keep(flat[start : start + group * k], capacity, moe["drop_policy"])
    # An expert that computes nothing has no limit.
    kept = [on or (e >= model.num_experts and v) for on, (e, _, v) in zip(kept, flat, strict=True)]
    assert [on for b, s in order for on in routing.kept[b, s].tolist()] == kept
    assert totals[-3] == sum(v and not on for (_, _, v), on in zip(flat, kept, strict=True))


def make_layer(model: ModelConfig, shared: bool, **moe: object) -> MoE:
    dense = torch.nn.Linear(model.hidden_size, model.hidden_size, dtype=torch.float64) if shared else None
    layer = MoE(model, MoEConfig(experts="loop", **moe), 0, dense, BackendConfig(), Latent(model, BackendConfig())).to(
        torch.float64
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return layer


def run_layer(layer: MoE, x: torch.Tensor, rows: Tokens) -> list[torch.Tensor]:
    """Output, and gradients of a sum that weighs every element differently."""
    x = x.clone().requires_grad_()
    y = layer(x, rows)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


@settings(deadline=None, max_examples=40)
@given(
    model=model_configs((2, 4, 8)),
    moe=drops(),
    batch=st.integers(1, 2),
    size=st.integers(1, 8),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_padding_to_capacity_changes_no_output_and_no_gradient(
    model: ModelConfig, moe: dict, batch: int, size: int, shared: bool, seed: int
) -> None:
    x, rows = draw_tokens((batch, size, model.hidden_size), seed, False), make_rows(batch, size, size // 3)
    moe = moe | dict(z_loss_coef=0.1)
    plain = run_layer(make_layer(model, shared, **moe), x, rows)
    padded_layer = make_layer(model, shared, **moe, pad_to_capacity=True)
    computed: list[list[int]] = []
    padded_layer.experts.register_forward_hook(lambda m, inputs, out: computed.append(inputs[2].tolist()))
    for got, expected in zip(run_layer(padded_layer, x, rows), plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    tokens = size if moe["drop_scope"] == "sequence" else batch * size
    scored = model.num_scored_experts
    capacity = expert_capacity(moe["capacity_factor"], tokens, model.num_experts_per_token, scored) * (
        batch if moe["drop_scope"] == "sequence" else 1
    )
    assert computed == [[capacity * (e + 1) for e in range(model.num_experts)]], "static shapes"


@settings(deadline=None, max_examples=40)
@given(model=model_configs((2, 4, 8)), moe=drops(), shared=st.booleans(), seed=st.integers(0, 1000))
def test_what_is_dropped_adds_nothing_and_the_rest_is_not_renormalised(
    model: ModelConfig, moe: dict, shared: bool, seed: int
) -> None:
    """So a token without a kept choice leaves a block as the residual (and the shared experts) made it."""
    x, rows = draw_tokens((2, 6, model.hidden_size), seed, False), make_rows(2, 6, 2)
    layer = make_layer(model, shared, **moe)
    y = layer(x, rows).detach()
    routing = layer.router.eval()(x, rows)
    expected = torch.zeros_like(x) if layer.shared_experts is None else layer.shared_experts(x).detach()
    gate_up, down = layer.experts.gate_up_proj.detach(), layer.experts.down_proj.detach()
    for b, s, slot in routing.kept.nonzero().tolist():
        e, out = int(routing.topk_expert_ids[b, s, slot]), x[b, s]  # of an identity
        if e < model.num_experts:
            gate, up = gate_up[e] @ x[b, s]
            out = down[e] @ (torch.nn.functional.silu(gate) * up)
        expected[b, s] += routing.topk_probs[b, s, slot].detach() * out
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    gone = ~routing.kept.any(-1)
    assert gone.any(), "padding at least keeps nothing"
    if not shared:
        assert torch.equal(y[gone], torch.zeros_like(y[gone]))


@settings(deadline=None, max_examples=60)
@given(ids=st.lists(st.integers(0, 5), min_size=1, max_size=40), priorities=st.one_of(st.none(), st.integers(0, 1000)))
def test_the_place_in_the_queue_of_an_expert(ids: list[int], priorities: int | None) -> None:
    values = torch.randint(0, 4, (len(ids),), generator=torch.Generator().manual_seed(priorities or 0))
    priority = None if priorities is None else values.view(1, -1)
    got = rank_within_expert(torch.tensor([ids]), 5, priority)[0].tolist()
    order = range(len(ids))
    if priority is not None:
        order = sorted(order, key=lambda i: (-int(values[i]), i))
    seen: dict[int, int] = {}
    for i in order:
        assert got[i] == seen.get(ids[i], 0)
        seen[ids[i]] = got[i] + 1


def test_capacity_counts_choices_and_takes_the_factor_as_written() -> None:
    assert expert_capacity(1.0, 4096, 8, 64) == 512
    assert expert_capacity(1.25, 10, 2, 8) == 4  # 3.125
    assert expert_capacity(1.1, 100, 1, 10) == 11  # in binary 1.1 * 100 / 10 is a little more than 11
    assert expert_capacity(100.0, 16, 2, 8) == 16  # a token chooses an expert once


def test_scores_of_very_low_logits_have_finite_gradients() -> None:
    model = ModelConfig(
        hidden_size=4, num_experts=4, num_experts_per_token=2, router=RouterConfig(score="sqrt_softplus")
    )
    router = Router(model, MoEConfig(), 0)
    router.weight = torch.nn.Parameter(torch.eye(4))
    x = torch.full((1, 2, 4), -1e4).requires_grad_()
    x.data[0, 1] = torch.tensor([1e4, 90.0, 0.0, -90.0])
    routing = router(x, make_rows(1, 2, 0))
    routing.topk_probs.sum().backward()
    assert x.grad.isfinite().all() and routing.topk_probs.isfinite().all()
    assert routing.topk_expert_ids[0, 1].tolist() == [0, 1]


def micro_batch_formula(x: torch.Tensor, router: Router, rows: Tokens) -> torch.Tensor:
    shares = (x @ router.weight.T).softmax(-1)
    ids = shares.topk(router.top_k, dim=-1).indices[rows.valid]
    f = torch.bincount(ids.flatten(), minlength=router.num_scored_experts).double() / ids.numel()
    return router.num_scored_experts * (f * shares[rows.valid].mean(0)).sum()


def z_formula(x: torch.Tensor, router: Router, rows: Tokens) -> torch.Tensor:
    return (x @ router.weight.T)[rows.valid].exp().sum(-1).log().square().mean()


@pytest.mark.parametrize(
    ("coef", "formula"), [("micro_batch_balance_coef", micro_batch_formula), ("z_loss_coef", z_formula)]
)
@pytest.mark.parametrize("dropping", [{}, dict(capacity_factor=0.2)], ids=["dropless", "dropping"])
def test_the_gradient_of_a_loss_is_that_of_its_formula(coef: str, formula, dropping: dict) -> None:
    model = ModelConfig(hidden_size=8, num_experts=8, num_experts_per_token=2)
    router = Router(model, MoEConfig(**{coef: COEF}, **dropping), 0)
    router.weight = torch.nn.Parameter(draw_tokens((8, 8), 1, False))
    x, rows = draw_tokens((2, 6, 8), 0, False).requires_grad_(), make_rows(2, 6, 2)
    weights = router(x, rows).topk_probs
    # What arrives from the weights themselves is nothing; what is left is the loss's own gradient.
    got = torch.autograd.grad(weights, [x, router.weight], torch.zeros_like(weights))
    expected = torch.autograd.grad(COEF * formula(x, router, rows), [x, router.weight])
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
        assert theirs.norm() > 1e-3
