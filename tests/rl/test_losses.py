"""Losses equal those of TRL and verl on the same numbers (``tests/rl/reference_losses.py``), or formulas written out here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from automoe.comm.tokens import IGNORE, TokenCounts
from automoe.errors import ConfigError
from automoe.model.loss import LossInputs
from automoe.rl import losses
from automoe.rl.loss_options import check_options
from automoe.rl.losses import Correction

REFERENCE = json.loads(Path(__file__).with_name("reference_losses.json").read_text())
HORIZON = REFERENCE["horizon"]
# Samples by row, packed as a session packs them: some positions are padding or a prompt's.
ROWS = ((2, 1), (4, 0), (3, 5))
ROW_LENGTH = 12
WEIGHTS = {"clip_low": 3e-2, "clip_high": 4e-2}
EVEN = {"clip_high": 0.2}


def placed(values: list[Any]) -> torch.Tensor:
    """[B, S] numbers of the samples, one number or one a token; 9 elsewhere, which nothing may read."""
    found = torch.full((len(ROWS), ROW_LENGTH), 9.0, dtype=torch.float64)
    for row, samples in enumerate(ROWS):
        at = 1
        for sample in samples:
            length = len(REFERENCE["log_probs"][sample])
            found[row, at : at + length] = torch.tensor(values[sample], dtype=torch.float64)
            at += length + 1
    return found


def inputs_of(names: tuple[str, ...] = ("advantages", "old_log_probs")) -> LossInputs:
    labels = torch.where(placed([0.0] * 6) == 0, 0, IGNORE)
    doc_ids = torch.full_like(labels, -1)
    for row, samples in enumerate(ROWS):
        at = 0
        for document, sample in enumerate(samples):
            length = len(REFERENCE["log_probs"][sample]) + 1
            doc_ids[row, at : at + length] = document
            at += length
    counts = TokenCounts((labels >= 0).sum(), (doc_ids >= 0).sum(), torch.tensor(6))
    return LossInputs(labels, doc_ids, counts, given={name: placed(REFERENCE[name]) for name in names})


def loss_and_gradient(loss: Callable[..., torch.Tensor], **options: Any) -> tuple[float, torch.Tensor, LossInputs]:
    inputs = inputs_of(("advantages", "old_log_probs", "sampler_log_probs", "ref_log_probs"))
    nll = (-placed(REFERENCE["log_probs"])).masked_fill(inputs.labels < 0, 0.0).requires_grad_()
    value = loss(nll, inputs, **options)
    (gradient,) = torch.autograd.grad(value, nll)
    return value.item(), -gradient, inputs


@pytest.mark.parametrize(
    ("case", "loss", "options"),
    [
        ("trl grpo", losses.grpo, {}),
        ("trl grpo delta", losses.grpo, {"dual_clip": 1.3}),
        ("trl dapo", losses.dapo, {}),
        ("trl dr_grpo", losses.dr_grpo, {"length": HORIZON}),
        ("trl gspo", losses.gspo, WEIGHTS),
        ("trl cispo", losses.cispo, {"clip_high": 0.2}),
        ("trl sapo", losses.sapo, {}),
        ("trl kl", losses.grpo, {"kl_coef": 0.3}),
        ("trl kl weighted", losses.grpo, {"kl_coef": 0.3, "kl_kind": "k3_weighted"}),
        ("trl token_truncate", losses.dapo, EVEN | {"correction": Correction(high=1.1)}),
        ("trl token_mask", losses.dapo, EVEN | {"correction": Correction("mask", high=1.1, low=0.8)}),
        ("trl sequence_mask", losses.dapo, EVEN | {"correction": Correction("mask", "sequence", 1.1)}),
        ("verl vanilla", losses.dapo, {"dual_clip": 1.3}),
        ("verl vanilla samples", losses.grpo, {"dual_clip": 3.0}),
        ("verl vanilla length", losses.dr_grpo, {"length": HORIZON, "dual_clip": 3.0}),
        ("verl gspo", losses.gspo, WEIGHTS),
        ("verl cispo", losses.cispo, {"clip_low": 0.1, "clip_high": 0.2}),
        ("verl dppo", losses.dppo, {"clip_low": 0.02, "clip_high": 0.01, "high": 1.1}),
        ("trl drift", losses.dapo, EVEN | {"max_drift": 0.05}),
        ("verl sapo", losses.sapo, {}),
        ("verl token truncate", losses.dapo, EVEN | {"correction": Correction(high=1.1)}),
        ("verl sequence truncate", losses.dapo, EVEN | {"correction": Correction("truncate", "sequence", 1.1)}),
    ],
)
def test_a_loss_is_that_of_trl_and_verl(case: str, loss: Callable[..., torch.Tensor], options: dict[str, Any]) -> None:
    same = REFERENCE["cases"][case]
    value, gradient, inputs = loss_and_gradient(loss, **options)
    tolerance = 1e-7 if case.startswith("verl") else 1e-11  # verl adds 1e-8 to an answer's length
    assert value == pytest.approx(same["loss"], rel=0, abs=tolerance)
    expected = placed(same["gradient"]).masked_fill(inputs.labels < 0, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance)
    assert expected.abs().max() > 1e-3 and set(inputs.reported) <= set(losses.METRICS)


@pytest.mark.parametrize(("case", "kind"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3+", "k3_by_k2")])
def test_estimates_of_the_kl_are_verls(case: str, kind: losses.KL) -> None:
    same = REFERENCE["cases"][f"verl kl {case}"]
    value, gradient, inputs = loss_and_gradient(
        lambda nll, inputs: losses.averaged(losses.kl(nll, inputs, kind), inputs, "tokens")
    )
    assert value == pytest.approx(same["loss"], rel=1e-9)
    expected = placed(same["gradient"]).masked_fill(inputs.labels < 0, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_every_case_of_the_references_is_compared() -> None:
    compared = set()
    for test in (test_a_loss_is_that_of_trl_and_verl, test_estimates_of_the_kl_are_verls):
        compared |= {case[0] for mark in test.pytestmark for case in mark.args[1]}  # type: ignore[attr-defined]
    assert compared == {case.removeprefix("verl kl ") for case in REFERENCE["cases"]}


@pytest.mark.parametrize("level", ["token", "sequence", "mean"])
def test_dropped_answers_are_counted_by_length(level: Any) -> None:
    correction = Correction("reject", level, high=1.05, low=0.95)
    _, _, inputs = loss_and_gradient(losses.dapo, correction=correction)
    dropped = 0
    for old, sampler in zip(REFERENCE["old_log_probs"], REFERENCE["sampler_log_probs"], strict=True):
        log_w = torch.tensor(old, dtype=torch.float64) - torch.tensor(sampler, dtype=torch.float64)
        w = {"token": log_w, "sequence": log_w.sum(), "mean": log_w.mean()}[level].exp()
        dropped += bool(((w < 0.95) | (w > 1.05)).any())
    assert 0 < dropped <= 6
    assert inputs.reported["dropped_share.to_128"].item() == pytest.approx(dropped)
    assert inputs.reported["answers.to_128"].item() == pytest.approx(6)
    assert inputs.reported["answers.to_512"].item() == 0


def test_distillation_of_sampled_tokens_is_a_policy_gradient_of_the_reverse_kl() -> None:
    inputs = inputs_of(("old_log_probs", "ref_log_probs"))
    given = {"old_log_probs": inputs.given["old_log_probs"], "teacher_log_probs": inputs.given["ref_log_probs"]}
    inputs = LossInputs(inputs.labels, inputs.doc_ids, inputs.counts, given=given)
    nll = (-given["old_log_probs"]).masked_fill(inputs.labels < 0, 0.0).requires_grad_()
    (gradient,) = torch.autograd.grad(losses.distill(nll, inputs), nll)
    gap = given["old_log_probs"] - given["teacher_log_probs"]
    expected = (gap / inputs.counts.trained).masked_fill(inputs.labels < 0, 0.0)
    torch.testing.assert_close(-gradient, expected)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("number", [3, 7])
def test_top_k_distillation_is_the_kl_with_one_id_for_the_rest(direction: Any, number: int) -> None:
    """With 3 of 8 ids, the other 5 are one; with 7, the last id is the rest itself, and the KL is whole."""
    torch.manual_seed(3)
    labels = torch.tensor([[0, 0, IGNORE, 0]])
    ours = torch.randn(1, 4, 8, dtype=torch.float64).log_softmax(-1)
    theirs = torch.randn(1, 4, 8, dtype=torch.float64).log_softmax(-1)
    order = theirs.argsort(-1, descending=True)
    ours, theirs = ours.gather(-1, order), theirs.gather(-1, order)
    counts = TokenCounts(torch.tensor(3), torch.tensor(4), torch.tensor(1))
    given = {"teacher_log_probs": theirs[..., :number]}
    inputs = LossInputs(labels, None, counts, given=given, scored=ours[..., :number])
    value = losses.distill_top_k(torch.zeros(1, 4, dtype=torch.float64), inputs, direction=direction)
    merged = [torch.cat((x[..., :number], x[..., number:].logsumexp(-1, keepdim=True)), -1) for x in (ours, theirs)]
    p, q = merged if direction == "forward" else merged[::-1]
    expected = F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(value, expected[labels >= 0].mean())


def test_equal_rewards_have_no_advantage() -> None:
    assert losses.group_advantages([0.1] * 3 + [1.0, 0.0, 0.5], 3)[:3] == [0.0, 0.0, 0.0]
    unequal = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    expected = (unequal - 0.5) / (unequal.std() + 1e-4)
    assert losses.group_advantages([1.0, 0.0, 0.5], 3) == pytest.approx(expected.tolist())
    assert losses.group_advantages([1.0, 0.0, 0.5], 3, scale=False) == pytest.approx([0.5, -0.5, 0.0])
    assert losses.group_advantages([0.7, 0.2], 1) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (losses.grpo, {"mean": "token"}, "losses.grpo.mean=token: must be one of tokens, samples, length, sum"),
        (losses.dapo, {"mean": "samples"}, "the loss takes clip_high, clip_low, correction"),
        (losses.dapo, {"kl_coef": 0.1, "kl_kind": "k9"}, "kl_kind=k9: must be one of k1"),
        (losses.gspo, {"clip_low": "x"}, "clip_low=x: expected a number"),
        (losses.dr_grpo, {}, "losses.dr_grpo.length=0: is a divisor, and has no default"),
        (losses.dr_grpo, {"length": 0}, "length=0: is a divisor"),
        (losses.cispo, {"correction": "truncate"}, "losses.cispo.correction=truncate: expected a mapping"),
        (losses.distill_top_k, {"direction": "fwd"}, "direction=fwd: must be one of forward, reverse"),
    ],
)
def test_options_of_no_meaning_are_refused(loss: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(loss, options)


@pytest.mark.parametrize("fields", [{"kind": "trunc"}, {"level": "seq"}, {"kind": "mask", "high": 0.5, "low": 2.0}])
def test_corrections_of_no_meaning_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="correction"):
        Correction(**fields)


@pytest.mark.parametrize("size", [0, 2])
def test_rewards_that_fill_no_groups_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="3 rewards are no number of whole groups"):
        losses.group_advantages([1.0, 2.0, 3.0], size)
