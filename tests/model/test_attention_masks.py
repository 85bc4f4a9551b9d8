"""Sinks and windows against the softmax written out, in float64; what layers see is what the mask says."""

from __future__ import annotations

import pytest
import torch

from automoe.model.attention import attention_mask
from automoe.model.attention_kernels import attend
from automoe.moe.tokens import Tokens

B, S, N, G, D = 2, 11, 4, 2, 6


def rows(doc_ids: torch.Tensor | None) -> Tokens:
    index = torch.arange(S).expand(B, S)
    return Tokens(index, index, doc_ids, torch.tensor(B * S))


def written_out(q, k, v, allowed, scale, sinks):
    """exp(score) v over the keys that are allowed, divided by their sum and the sink's."""
    k, v = (x.repeat_interleave(N // G, dim=2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
    weights = torch.where(allowed, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("bnqk,bknd->bqnd", weights / total, v)


def allowed_pairs(doc_ids: torch.Tensor | None, window: int) -> torch.Tensor:
    pairs = torch.zeros(B, 1, S, S, dtype=torch.bool)
    for b in range(B):
        for query in range(S):
            for key in range(query + 1):
                near = not window or query - key < window
                pairs[b, 0, query, key] = near and (doc_ids is None or doc_ids[b, query] == doc_ids[b, key])
    return pairs


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [-1] * 2])


@pytest.mark.parametrize("doc_ids", [None, DOCUMENTS], ids=["one_document", "documents"])
@pytest.mark.parametrize("window", [0, 1, 4, S + 3])
@pytest.mark.parametrize("dim", [D, 8])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_the_softmax_over_what_is_seen(
    doc_ids: torch.Tensor | None, window: int, dim: int, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(window)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    args = [normal(B, S, N, dim), normal(B, S, G, dim), normal(B, S, G, dim)]
    sinks = normal(N) if with_sinks else None
    trained = [*args, sinks] if sinks is not None else args
    mask = attention_mask(rows(doc_ids), window=window)
    assert (mask is None) == (doc_ids is None and not window)
    got = attend(*args, mask, dim**-0.5, sinks)
    wanted = written_out(*args, allowed_pairs(doc_ids, window), dim**-0.5, sinks)
    upstream = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(got.shape)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(got, trained, upstream), torch.autograd.grad(wanted, trained, upstream), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
