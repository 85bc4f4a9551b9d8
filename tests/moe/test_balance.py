"""Balance losses against the formula written out, attached gradients, expert bias."""

from __future__ import annotations

import pytest
import torch
from test_router import B, E, S, hidden_states, make_router, make_rows

from automoe.config.schema import RouterConfig
from automoe.moe.balance import attach_loss, choices_by_sequence, update_expert_bias

pytestmark = pytest.mark.usefixtures("trains")


def shares_of(router, x: torch.Tensor) -> torch.Tensor:
    logits = x @ router.weight.T
    if router.config.score == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def sequence_loss(router, x: torch.Tensor, plain_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Mean over rows, each weighted by its tokens, of E sum_e f_e P_e, one row and expert at a time."""
    shares, k, total = shares_of(router, x), router.top_k, x.new_zeros(())
    for b in range(B):
        tokens = [s for s in range(S) if valid[b, s]]
        for e in range(E):
            f = E * sum(int((plain_ids[b, s] == e).sum()) for s in tokens) / (k * len(tokens))
            p = sum(shares[b, s, e] for s in tokens) / len(tokens)
            total = total + f * p * len(tokens)
    return total / int(valid.sum())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padding", [0, 5])
def test_the_sequence_loss_and_its_gradient_are_the_formula(score: str, padding: int) -> None:
    router = make_router(RouterConfig(score=score), seq_balance_coef=0.5)
    x, rows = hidden_states(), make_rows(padding)
    routing = router(x, rows)
    # With the weights detached from everything but the attached loss, what is left is its gradient.
    routing.topk_probs.backward(torch.zeros_like(routing.topk_probs))
    got = router.weight.grad.clone()
    expected = 0.5 * sequence_loss(router, x, routing.plain_ids, rows.valid)
    [gradient] = torch.autograd.grad(expected, router.weight)
    assert router.load.totals[2 * E].item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-14)
    assert gradient.norm() > 1e-6


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_lagged_loss_uses_last_steps_fractions_and_this_steps_shares(score: str) -> None:
    router = make_router(RouterConfig(score=score), global_balance_coef=0.3)
    fractions = torch.rand(E, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    router.load_fractions.copy_(fractions / fractions.sum())
    x, rows = hidden_states(), make_rows(padding=5)
    routing = router(x, rows)
    routing.topk_probs.backward(torch.zeros_like(routing.topk_probs))
    got = router.weight.grad.clone()
    mean_shares = shares_of(router, x)[rows.valid].mean(0)
    expected = 0.3 * E * (router.load_fractions * mean_shares).sum()
    [gradient] = torch.autograd.grad(expected, router.weight)
    assert router.load.totals[2 * E + 1].item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-14)


def test_even_load_and_even_shares_have_a_loss_of_the_coefficient() -> None:
    """The minimum of E sum f P: one, times c, however many experts there are."""
    router = make_router(RouterConfig(), top_k=E, seq_balance_coef=0.7, global_balance_coef=0.9)
    router.weight.data.zero_()
    router(hidden_states(), make_rows())
    assert router.load.totals[2 * E : 2 * E + 2].tolist() == pytest.approx([0.7, 0.9])


def test_the_loss_counts_plain_choices_and_the_bias_counts_real_ones() -> None:
    router = make_router(RouterConfig(score="sigmoid", expert_bias=True), seq_balance_coef=0.1)
    routing = router(hidden_states(), make_rows())
    assert not torch.equal(routing.topk_expert_ids, routing.plain_ids)
    assert router.load.totals[:E].tolist() == torch.bincount(routing.topk_expert_ids.flatten(), minlength=E).tolist()
    assert router.load.totals[E : 2 * E].tolist() == torch.bincount(routing.plain_ids.flatten(), minlength=E).tolist()


def test_attaching_a_loss_changes_no_value_and_adds_its_gradient() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    theta = torch.tensor(3.0, requires_grad=True)
    y = attach_loss(x, theta**2)
    assert torch.equal(y, x)
    (5 * y).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0] and theta.grad.item() == 6.0  # not 5 x 6: no chain with y


def test_choices_are_counted_per_row_without_padding() -> None:
    ids = torch.tensor([[[0, 1], [1, 2]], [[3, 3], [0, 1]]])
    valid = torch.tensor([[True, True], [True, False]])
    assert choices_by_sequence(ids, valid, 4).tolist() == [[1, 2, 1, 0], [0, 0, 0, 2]]


def test_the_bias_moves_towards_even_load_by_its_rate() -> None:
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    update_expert_bias(bias, torch.tensor([10.0, 4.0, 0.0, 2.0], dtype=torch.float64), rate=0.25)
    assert bias.tolist() == [0.25, 0.0, -0.25, 0.25]  # the mean is 4: over, at, under, under
