"""Keys and values on their way around CPU ranks: attention and its gradients as over the whole row."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from automoe.comm.collectives import communicator
from automoe.comm.communicators import SINGLE_RANK
from automoe.comm.tokens import Tokens
from automoe.model.rows import head_tail_index
from automoe.parallel.ring import cpu_ring, ring_masks
from automoe.verify.pool import RankPool

B, R, N, G, D, DV = 3, 24, 6, 2, 16, 8
SCALE = 0.3


def rows(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Queries, keys and values of whole rows, the gradient of the output, and documents."""
    generator = torch.Generator().manual_seed(0)
    shapes = (N, D), (G, D), (G, DV), (N, DV)
    *given, grad = (2 * torch.randn(B, R, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    docs = torch.zeros(B, R, dtype=torch.long)  # the first row is one document
    docs[1] = torch.arange(R) // 5  # borders inside chunks
    docs[2] = torch.arange(R)
    docs[2, 20:] = -1
    return [one.to(dtype) for one in given], grad.to(dtype), docs


def whole(dtype: torch.dtype, with_docs: bool) -> list[torch.Tensor]:
    given, grad, docs = rows(dtype)
    q, k, v = (one.double().requires_grad_() for one in given)
    mask = torch.ones(R, R, dtype=torch.bool).tril()[None, None]
    if with_docs:
        mask = mask & (docs[:, None, :, None] == docs[:, None, None])
    heads = (one.transpose(1, 2) for one in (q, k, v))
    out = scaled_dot_product_attention(*heads, mask, scale=SCALE, enable_gqa=True).transpose(1, 2)
    out.backward(grad.double())
    return [one.detach() for one in (out, q.grad, k.grad, v.grad)]


def around(dtype: torch.dtype, with_docs: bool) -> list[torch.Tensor]:
    """This rank's positions of the output and of the gradients."""
    given, grad, docs = rows(dtype)
    index = head_tail_index(R, dist.get_world_size(), dist.get_rank())
    here = [one[:, index].requires_grad_() for one in given]
    place = index.expand(B, -1)
    tokens = Tokens(place, place, docs[:, index] if with_docs else None, torch.tensor(B * R))
    ranks = communicator(dist.group.WORLD)
    [block] = ring_masks(ranks)(tokens, SINGLE_RANK, 0, False)
    out = cpu_ring(dist.group.WORLD)(*here, block.mask, SCALE)
    out.backward(grad[:, index])
    return [out.detach(), *(one.grad for one in here)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("with_docs", [True, False], ids=["documents", "one document"])
@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_ring_attends_and_learns_as_whole_rows_do(num_ranks: int, with_docs: bool, ranks: RankPool) -> None:
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.bfloat16, 1e-2)):
        wanted = whole(dtype, with_docs)
        for rank, found in enumerate(ranks.run(around, num_ranks, dtype, with_docs)):
            index = head_tail_index(R, num_ranks, rank)
            for one, all_positions in zip(found, wanted, strict=True):
                assert one.dtype == dtype and relative(one.double(), all_positions[:, index]) < tolerance
