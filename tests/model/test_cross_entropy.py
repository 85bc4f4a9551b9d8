"""Chunked cross-entropy against torch's: value, both gradients, nothing trained, many chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import automoe.config.rules_kernels
from automoe.comm.collectives import communicator
from automoe.comm.communicators import SINGLE_RANK
from automoe.comm.tokens import IGNORE, TokenCounts, num_documents
from automoe.config.rules_kernels import chunk_tokens
from automoe.model.loss import LossInputs, chunk_loss, chunk_loss_fn, cross_entropy_sum, greedy_tokens, token_scores
from automoe.verify.pool import RankPool

T, H, V = 30, 8, 21


def inputs(dtype: torch.dtype, ignored: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[torch.randperm(T, generator=generator)[:ignored]] = IGNORE
    return x, weight, labels


@pytest.mark.parametrize("ignored", [0, 11, T - 1, T])
@pytest.mark.parametrize("chunk", [1, 7, 30, 1024])  # H at least
def test_value_and_gradients_are_torchs(monkeypatch: pytest.MonkeyPatch, chunk: int, ignored: int) -> None:
    monkeypatch.setattr(automoe.config.rules_kernels, "CHUNK_TOKENS", chunk)
    x, weight, labels = inputs(torch.float64, ignored)
    got = cross_entropy_sum(x, weight, labels)
    expected = F.cross_entropy(x @ weight.T, labels, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    scale = 0.37  # what reaches the loss from above is not one
    for mine, theirs in zip(
        torch.autograd.grad(got * scale, (x, weight)), torch.autograd.grad(expected * scale, (x, weight)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_a_mean_over_tokens_scales_narrow_gradients_exactly() -> None:
    """1 / 817 is 0.3% from any number of bfloat16; each gradient is rounded by itself."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16().requires_grad_() for n in (510, V))
    labels = torch.randint(0, V, (510,), generator=generator)
    loss = cross_entropy_sum(x, weight, labels)
    whole = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    for got, want in zip(torch.autograd.grad(loss / 817, (x, weight)), whole, strict=True):
        ratio = 817 * (got.double() * want.double()).sum() / want.double().square().sum()
        assert abs(float(ratio) - 1) < 1e-3


@pytest.mark.parametrize(("cap", "skips"), [(2.0, True), (30.0, False)])
def test_a_soft_cap_bounds_logits_before_temperature_and_choice(
    monkeypatch: pytest.MonkeyPatch, cap: float, skips: bool
) -> None:
    """Losses, single tokens' scores and their gradients are those of torch on cap * tanh(logits / cap)."""
    monkeypatch.setattr(automoe.config.rules_kernels, "CHUNK_TOKENS", 7)
    x, weight, labels = inputs(torch.float64, 11)
    logits = cap * torch.tanh(x @ weight.T / cap)
    hits = torch.zeros((), dtype=torch.int64)
    got = cross_entropy_sum(x, weight, labels, hits=hits, soft_cap=cap)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    assert int(hits) == int((logits.argmax(-1) == labels).sum())
    temperature, candidates = torch.linspace(0.5, 2, T, dtype=torch.float64), torch.full((T, 3), -1)
    trained = labels != IGNORE
    candidates[trained] = torch.stack([(labels + shift) % V for shift in range(3)], 1)[trained]
    sampler = temperature, candidates, torch.stack([labels.clamp_min(0), (labels.clamp_min(0) + 1) % V], 1)
    options = {"wants_entropy": True, "soft_cap": cap, "skips_untrained": skips}
    scores = token_scores(x, weight, labels, 0, SINGLE_RANK, *sampler, **options)
    kept = torch.zeros(T, V, dtype=torch.bool).scatter_(1, candidates.clamp_min(0), trained[:, None].expand(T, 3))
    log_p = (logits / temperature[:, None]).masked_fill(~kept & trained[:, None], -1e300).log_softmax(-1)
    nll = -log_p.gather(1, labels.clamp_min(0)[:, None]).squeeze(1) * trained
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1) * trained
    scored = log_p.gather(1, sampler[2]) * trained[:, None]
    for mine, theirs in [(got, expected), (scores.nll_T, nll), (scores.entropy_T, entropy), (scores.scored_TK, scored)]:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
        each = torch.linspace(-1, 2, mine.numel(), dtype=torch.float64).view_as(mine)
        grads = (torch.autograd.grad((one * each).sum(), (x, weight), retain_graph=True) for one in (mine, theirs))
        for ours, torchs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-11, atol=1e-13)
    flat = 1e-6 * cap  # so small a cap makes all large logits of a token equal: the first one is taken
    assert (
        greedy_tokens(x, weight, soft_cap=flat).tolist() == (flat * torch.tanh(x @ weight.T / flat)).argmax(-1).tolist()
    )


def test_a_soft_cap_keeps_the_dtypes_of_gradients() -> None:
    x, weight, labels = inputs(torch.bfloat16, 0)
    loss = cross_entropy_sum(x, weight, labels, soft_cap=3.0)
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == weight.grad.dtype == torch.bfloat16
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = F.cross_entropy(3 * torch.tanh(wide_x @ wide_weight.T / 3), labels, reduction="sum")
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for mine, theirs in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (mine.double() - theirs).norm() < 2e-2 * theirs.norm()


@pytest.mark.parametrize(
    ("tokens", "hidden", "expected"),
    [(0, 8, 1), (300, 64, 300), (513, 64, 171), (4096, 2048, 2048), (4096, 7168, 4096), (12289, 7168, 3073)],
)
def test_chunks_are_alike_and_as_large_as_the_head(tokens: int, hidden: int, expected: int) -> None:
    assert chunk_tokens(tokens, hidden) == expected


@pytest.mark.parametrize("hidden", [2048, 2880, 3072, 4096, 5120, 7168])
@pytest.mark.parametrize("tokens", [4096, 5120, 12288, 32768, 65536])
def test_no_usual_size_leaves_a_shorter_chunk(tokens: int, hidden: int) -> None:
    chunk = chunk_tokens(tokens, hidden)
    assert tokens % chunk == 0 and chunk <= max(512, min(hidden, 4096)) < 2 * chunk


def test_a_loss_without_gradients_computes_none() -> None:
    """A parameter's ``needs_input_grad`` is True under ``no_grad`` too."""
    x, weight, labels = inputs(torch.float32, 3)
    wanted = []

    def chunk(*args: Any) -> Any:
        wanted.append(args[5])
        return chunk_loss(*args)

    with torch.no_grad():
        value = cross_entropy_sum(x, torch.nn.Parameter(weight), labels, chunk_fn=chunk)
    assert set(wanted) == {False}
    assert torch.equal(value, cross_entropy_sum(x, weight, labels).detach())


def test_logits_beyond_exp_do_not_overflow() -> None:
    x = torch.tensor([[1e4]])
    loss = cross_entropy_sum(x, torch.tensor([[1.0], [0.5], [-1.0]]), torch.tensor([1]))
    assert loss.item() == pytest.approx(5e3)


def of_a_rank(kernel: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Loss, both gradients and hits of a rank that has its part of the vocabulary."""
    x, weight, labels = inputs(torch.float32, 11)
    rows = weight.detach().chunk(dist.get_world_size())
    mine = rows[dist.get_rank()].clone().requires_grad_()
    first, hits = sum(map(len, rows[: dist.get_rank()])), torch.zeros((), dtype=torch.int64)
    vocab = communicator(dist.group.WORLD)
    loss = cross_entropy_sum(x, mine, labels, first, vocab, chunk_loss_fn(kernel), hits)
    loss.backward()
    return loss.detach(), x.grad, mine.grad, int(hits)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_a_vocabulary_in_parts_has_the_loss_of_the_whole(ranks: RankPool, kernel: str) -> None:
    x, weight, labels = inputs(torch.float64, 11)
    hits = torch.zeros((), dtype=torch.int64)
    expected = cross_entropy_sum(x, weight, labels, hits=hits)
    expected.backward()
    losses, grads_x, grads_weight, found = zip(*ranks.run(of_a_rank, 2, kernel), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(sum(grads_x).double(), x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(grads_weight).double(), weight.grad, rtol=1e-5, atol=1e-6)
    assert set(found) == {hits.item()} and hits > 0


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_same(frozen: str) -> None:
    x, weight, labels = inputs(torch.float64, 5)
    both = torch.autograd.grad(cross_entropy_sum(x, weight, labels), (x, weight))
    (x if frozen == "x" else weight).requires_grad_(False)
    cross_entropy_sum(x, weight, labels).backward()
    assert (x.grad is None) == (frozen == "x") and (weight.grad is None) == (frozen == "weight")
    assert torch.equal(weight.grad, both[1]) if frozen == "x" else torch.equal(x.grad, both[0])


def test_bfloat16_sums_in_float32() -> None:
    x, weight, labels = inputs(torch.bfloat16, 0)
    loss = cross_entropy_sum(x, weight, labels)
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == weight.grad.dtype == torch.bfloat16
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = F.cross_entropy(wide_x @ wide_weight.T, labels, reduction="sum")
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    exact.backward()
    for mine, theirs in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (mine.double() - theirs).norm() < 2e-2 * theirs.norm()


@pytest.mark.parametrize("ignored", [0, 11, T])
@pytest.mark.parametrize(("chunk", "skips"), [(7, True), (7, False), (1024, True)])
def test_losses_of_single_tokens_and_their_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, chunk: int, skips: bool, ignored: int
) -> None:
    monkeypatch.setattr(automoe.config.rules_kernels, "CHUNK_TOKENS", chunk)
    x, weight, labels = inputs(torch.float64, ignored)
    got = token_scores(x, weight, labels, skips_untrained=skips).nll_T
    expected = F.cross_entropy(x @ weight.T, labels, ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    each = torch.linspace(-1, 2, T, dtype=torch.float64)  # every token's loss counts otherwise
    for mine, theirs in zip(
        torch.autograd.grad((got * each).sum(), (x, weight)),
        torch.autograd.grad((expected * each).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    weight.requires_grad_(False)
    token_scores(x, weight, labels, skips_untrained=skips).nll_T.sum().backward()
    assert weight.grad is None and x.grad is not None


def test_sums_by_document_leave_padding_out() -> None:
    doc_ids = torch.tensor([[0, 0, 1, 2, 2, -1], [0, 1, 1, 1, -1, -1]])
    labels = torch.where((torch.arange(6) % 2 == 0) & (doc_ids >= 0), 5, IGNORE)
    zero = torch.zeros((), dtype=torch.int64)
    x = torch.arange(12.0).view(2, 6).requires_grad_()
    sums = LossInputs(labels, doc_ids, TokenCounts(zero, zero, zero)).sum_by_document(x, 3)
    assert sums.tolist() == [[1.0, 2.0, 7.0], [6.0, 24.0, 0.0]]
    (sums * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [[1, 1, 2, 3, 3, 0], [1, 2, 2, 2, 0, 0]]
    assert num_documents(labels, doc_ids) == 5 and num_documents(labels, None) == 2
    labels = labels.clone()
    labels[0, 2], labels[1, :1] = IGNORE, IGNORE
    assert num_documents(labels, doc_ids) == 3
