"""Dispatch, then combine: whatever the routing, every token gets the weighted sum of its own experts.

Expert e multiplies by e + 1, so an answer tells which experts a token met and with what weight.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from automoe.comm.collectives import DispatchGroup
from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig
from automoe.errors import BackendError
from automoe.model.backend import BackendConfig
from automoe.model.block import Latent
from automoe.moe.dispatch import wire
from automoe.moe.dispatch.allgather import AllGatherDispatcher
from automoe.moe.dispatch.alltoall import AllToAllDispatcher
from automoe.moe.dispatch.base import LocalDispatcher, group_ends, sort_by_expert, sum_to_tokens
from automoe.moe.dispatch.hierarchical import HierarchicalDispatcher
from automoe.moe.dispatch.rows import RowExchange
from automoe.moe.dispatch.wire import decode_rows, encode_rows, rounded_to_8_bits
from automoe.moe.layer import MoE
from automoe.parallel.dispatchers import node_levels
from automoe.verify.pool import RankPool

E, H, WORLD = 8, 5, 4

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def multiplying_experts(first: int, num_local: int) -> Callable[..., torch.Tensor]:
    """Experts ``first`` ... of a rank; checks that rows are grouped by expert as ``offsets`` say."""

    def experts(x, gather_idx, offsets, probs):
        assert offsets.dtype == torch.int32 and offsets.shape == (num_local,)
        assert int(offsets[-1]) == gather_idx.numel() == probs.numel()
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).long()
        assert bool((counts >= 0).all())
        factors = torch.arange(first + 1, first + num_local + 1, dtype=x.dtype).repeat_interleave(counts)
        return x[gather_idx] * (probs * factors).unsqueeze(1)

    return experts


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return x * (weights * (ids + 1)).sum(1, keepdim=True)


def check(dispatcher, experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Output and both gradients against the formula."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    upstream = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    got = dispatcher(x, ids, weights, experts)
    got.backward(upstream)
    grads = x.grad, weights.grad
    x.grad = weights.grad = None
    want = expected(x, ids, weights)
    want.backward(upstream)
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-12)
    for grad, reference in zip(grads, (x.grad, weights.grad), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-12, atol=1e-12)


@st.composite
def routings(draw: st.DrawFn) -> Routed:
    tokens, top_k = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    # A pool of few experts leaves most of them without a token.
    pool = draw(st.lists(st.integers(0, E - 1), min_size=1, max_size=E))
    ids = draw(st.lists(st.sampled_from(pool), min_size=tokens * top_k, max_size=tokens * top_k))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(tokens, H, generator=generator, dtype=torch.float64)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    return x, torch.tensor(ids, dtype=torch.int64).view(tokens, top_k), weights


@settings(deadline=None, max_examples=100)
@given(routings())
def test_local_dispatch_is_the_weighted_sum_for_any_routing(routed: Routed) -> None:
    check(LocalDispatcher(E), multiplying_experts(0, E), *routed)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, E + 2), max_size=40))
def test_sorting_groups_choices_and_keeps_their_order(ids: list[int]) -> None:
    order, counts = sort_by_expert(torch.tensor(ids, dtype=torch.int64), E)
    assert [ids[i] for i in order] == sorted(ids)
    assert counts.tolist() == [ids.count(e) for e in range(E)]
    assert order.tolist() == sorted(range(len(ids)), key=lambda i: (ids[i], i))
    assert group_ends(counts).tolist() == [sum(i <= e for i in ids) for e in range(E)]


def test_rows_are_summed_to_their_tokens() -> None:
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    summed = sum_to_tokens(rows, torch.tensor([2, 0, 2]), 4)
    assert summed.tolist() == [[10.0, 20.0], [0.0, 0.0], [101.0, 202.0], [0.0, 0.0]]


ROUTINGS: dict[str, Callable[[torch.Generator, int, int], torch.Tensor]] = {
    "random": lambda g, tokens, k: torch.randint(0, E, (tokens, k), generator=g),
    "distinct": lambda g, tokens, k: torch.rand(tokens, E, generator=g).topk(k).indices,
    "one expert": lambda g, tokens, k: torch.full((tokens, k), 5),
    "first rank only": lambda g, tokens, k: torch.randint(0, E // WORLD, (tokens, k), generator=g),
    "last rank empty": lambda g, tokens, k: torch.randint(0, E - E // WORLD, (tokens, k), generator=g),
    "own rank": lambda g, tokens, k: torch.full((tokens, k), dist.get_rank() * (E // WORLD)),
}


def dispatched(kind: str, routing: str, tokens_per_rank: list[int], *top_ks: int) -> bool:
    """Rows in 8 bits are rounded beforehand: they must arrive as they are."""
    rank, num_local = dist.get_rank(), E // WORLD
    kind, _, per_node = kind.partition(" ")
    levels = [dist.group.WORLD]
    if kind == "hierarchical":
        levels = node_levels(dist.group.WORLD, int(per_node), None)
        assert [dist.get_world_size(group) for group in levels] == {1: [4], 2: [2, 2], 4: [4]}[int(per_node)]
    for seed, top_k, in_8_bits in product(range(3), top_ks, (False, True)):
        groups = [DispatchGroup(group, in_8_bits) for group in levels]
        if kind == "hierarchical":
            dispatcher = HierarchicalDispatcher(E, groups)
        else:
            dispatcher = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}[kind](E, groups[0])
        generator = torch.Generator().manual_seed(100 * seed + rank)
        tokens = tokens_per_rank[rank]
        x = torch.randn(tokens, H, generator=generator, dtype=torch.float64)
        if in_8_bits:
            x = decode_rows(encode_rows(x), H, x.dtype)
        weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
        ids = ROUTINGS[routing](generator, tokens, top_k)
        check(dispatcher, multiplying_experts(rank * num_local, num_local), x, ids, weights)
    return True


# A number is that of a node's ranks.
CASES = [*product(("alltoall", "allgather", "hierarchical 2"), ROUTINGS)]
CASES += [("hierarchical 1", "random"), ("hierarchical 4", "distinct")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "routing"), CASES)
def test_ranks_give_every_token_its_own_experts(ranks: RankPool, kind: str, routing: str) -> None:
    assert all(ranks.run(dispatched, WORLD, kind, routing, [6] * WORLD, 1, 3))


@pytest.mark.parametrize("tokens", [[0, 7, 1, 3], [0, 0, 0, 2], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("kind", ["alltoall", "hierarchical 2"])
def test_all_to_all_takes_any_number_of_tokens_a_rank(ranks: RankPool, kind: str, tokens: list[int]) -> None:
    assert all(ranks.run(dispatched, WORLD, kind, "distinct", tokens, 2))


class Loopback:
    """A group that brings every block back to where it came from."""

    rank = 0

    def __init__(self, num_ranks: int, in_8_bits: bool = False) -> None:
        self.num_ranks = num_ranks
        self.in_8_bits = in_8_bits

    def all_to_all(self, x: torch.Tensor, output_splits: list[int], input_splits: list[int]) -> torch.Tensor:
        assert output_splits == input_splits and sum(input_splits) == x.shape[0]
        return x.clone()

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        return x


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 7),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.booleans(),
)
def test_words_behind_rows_arrive_with_every_bit(
    counts: list[int], num_words: int, dtype: torch.dtype, in_8_bits: bool
) -> None:
    """Narrow rows, float32 words that no bfloat16 holds, and their gradients."""
    num_rows, num_tokens = sum(counts), 5
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_tokens, 6, generator=generator).to(dtype)
    x = (decode_rows(encode_rows(x), 6, dtype) if in_8_bits else x).requires_grad_()
    words = torch.randn(num_rows, num_words, generator=generator).to(torch.promote_types(dtype, torch.float32))
    words.requires_grad_()
    source = torch.randint(num_tokens, (num_rows,), generator=generator)
    counts_2P = torch.tensor([counts, counts])
    exchange = RowExchange(Loopback(len(counts), in_8_bits), x, source, words, counts_2P, counts, counts)
    lines, arrived = exchange.wait()
    assert lines.shape[1] == 6 and lines.dtype == dtype and lines.is_contiguous()
    assert torch.equal(arrived, words) and torch.equal(lines[exchange.receive_layout.line_M], x[source])
    grad_words = torch.randn(words.shape, generator=generator).to(words.dtype)
    rows = lines[exchange.receive_layout.line_M]
    grads = torch.autograd.grad((rows, arrived), (x, words), (torch.ones_like(rows), grad_words))
    assert torch.equal(grads[0], torch.bincount(source, minlength=5).to(dtype).unsqueeze(1).expand(5, 6))
    assert torch.equal(grads[1], grad_words)


@pytest.mark.parametrize("hidden", [1, 100, 128, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_in_8_bits(dtype: torch.dtype, hidden: int) -> None:
    """Within half of a step of 3 bits; a second time without a change; zeros, and what is not finite."""
    x = torch.randn(64, hidden, generator=torch.Generator().manual_seed(hidden)).to(dtype)
    x *= torch.logspace(-8, 8, 64, dtype=dtype).unsqueeze(1)  # rows, whose scales are their own
    x[5], x[6, 0], x[7, -1], x[8, 0] = 0, torch.nan, torch.inf, -torch.inf
    rounded = rounded_to_8_bits(x.requires_grad_())
    [grad] = torch.autograd.grad(rounded, x, torch.full_like(x, 3.0))
    assert torch.equal(grad, torch.full_like(x, 3.0))
    assert rounded.dtype == dtype and torch.equal(rounded[5], torch.zeros_like(x[5]))
    lost = torch.zeros_like(x, dtype=torch.bool)
    lost[6, :128] = lost[8, :128] = lost[7, (hidden - 1) // 128 * 128 :] = True
    assert torch.equal(rounded.isnan(), lost)
    finite = torch.where(lost, 0, x).detach()
    least = finite.abs().amax(1, keepdim=True) * 2.0**-17  # half the smallest code, of the row's largest number
    assert ((torch.where(lost, 0, rounded) - finite).abs() <= (finite.abs() / 16).clamp_min(least)).all()
    again = rounded_to_8_bits(torch.where(lost, 0, rounded))
    assert torch.equal(again, torch.where(lost, 0, rounded))


@pytest.mark.parametrize("recomputed", [False, True])
def test_experts_keep_rows_in_8_bits(monkeypatch: pytest.MonkeyPatch, recomputed: bool) -> None:
    """What they read is freed after the forward pass, and gradients are those of a layer that keeps it."""
    widened: list[StorageWeakRef] = []

    def watched(*args: Any) -> torch.Tensor:
        rows = decode_rows(*args)
        widened.append(StorageWeakRef(rows.untyped_storage()))
        return rows

    model = ModelConfig(hidden_size=160, num_experts=4, num_experts_per_token=2, moe_intermediate_size=16)
    layer = MoE(model, MoEConfig(dispatch_dtype="fp8"), 0, None, BackendConfig(), Latent(model, BackendConfig()))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    x = torch.randn(2, 8, 160, generator=generator).requires_grad_()
    index = torch.arange(8).expand(2, 8)
    tokens = Tokens(index, index, None, torch.tensor(16), row_ids=index)
    inputs = x, *layer.parameters()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # within others the layer keeps rows
        expected = torch.autograd.grad(layer(x, tokens).square().sum(), inputs)
    monkeypatch.setattr(wire, "decode_rows", watched)
    y = checkpoint(layer, x, tokens, use_reentrant=False) if recomputed else layer(x, tokens)
    assert [reference.expired() for reference in widened] == [True]
    gradients = torch.autograd.grad(y.square().sum(), inputs)
    assert len(widened) == 2 and all(reference.expired() for reference in widened)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def on_its_own_machine() -> str:
    with patch("socket.gethostname", lambda: f"host-{dist.get_rank()}"), pytest.raises(BackendError) as error:
        node_levels(dist.group.WORLD, 8, None)
    return str(error.value)


def test_a_node_that_is_several_machines_is_refused(ranks: RankPool) -> None:
    for rank, said in enumerate(ranks.run(on_its_own_machine, 2)):
        assert f"rank {rank}, on host-{rank}," in said and "cluster.gpus_per_node" in said
