"""The embedding's gradient: a sum over every place where a token occurs, whatever the dtype."""

from __future__ import annotations

import torch

from automoe.model.linear import Embedding


def test_a_frequent_token_is_summed_in_float32() -> None:
    """4,096 times 1/16: in bfloat16 a sum of 16 no longer changes by a 16th."""
    embedding = Embedding(4, 8).to(torch.bfloat16)
    torch.nn.init.normal_(embedding.weight)
    ids = torch.tensor([[1] * 4096 + [2, 3, 3]])
    out = embedding(ids)
    assert torch.equal(out, embedding.weight[ids])
    out.backward(torch.full_like(out, 1 / 16))
    expected = torch.tensor([0.0, 256.0, 1 / 16, 1 / 8]).unsqueeze(1).expand(4, 8)
    assert torch.equal(embedding.weight.grad.float(), expected)


def test_rows_of_other_ranks_give_zeros_and_get_no_gradient() -> None:
    part = Embedding(6, 4, first_id=2)
    part.weight = torch.nn.Parameter(torch.randn(2, 4).bfloat16())
    out = part(torch.tensor([[0, 2, 3, 5, 3]]))
    assert not out[0, [0, 3]].any()
    out.sum().backward()
    assert torch.equal(part.weight.grad, torch.tensor([[1.0], [2.0]]).expand(2, 4).bfloat16())
