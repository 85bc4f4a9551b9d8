"""Benchmark gates give the loads that they promise."""

from __future__ import annotations

import pytest
import torch

from automoe.moe.router import GATES, gate_ids

E, K, S = 16, 4, 4096


def choices(gate: str, layer: int = 0, size: int = S, top_k: int = K) -> torch.Tensor:
    return gate_ids(gate, torch.arange(size).expand(2, size), E, top_k, layer)


def loads(gate: str, layer: int = 0, top_k: int = K) -> torch.Tensor:
    return torch.bincount(choices(gate, layer, top_k=top_k).flatten(), minlength=E)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("top_k", [1, 3, E - 1])
def test_a_token_chooses_different_experts_that_exist(gate: str, top_k: int) -> None:
    ids = choices(gate, size=64, top_k=top_k)
    assert ids.shape == (2, 64, top_k) and ids.min() >= 0 and ids.max() < E
    assert all(len(set(token)) == top_k for token in ids.flatten(0, 1).tolist())


@pytest.mark.parametrize("gate", GATES)
def test_a_part_of_a_row_chooses_as_the_whole_row_does_there(gate: str) -> None:
    part = torch.arange(1, S, 3).expand(2, -1)
    assert torch.equal(gate_ids(gate, part, E, K, 2), choices(gate, 2)[:, 1::3])


def test_balanced_is_exact() -> None:
    assert loads("balanced").tolist() == [2 * S * K // E] * E


def test_empty_is_balanced_over_all_but_the_last() -> None:
    counts = loads("empty")
    assert counts[-1] == 0 and counts[:-1].max() - counts[:-1].min() <= 2


def test_one_hot_gives_everything_to_the_first_experts() -> None:
    assert loads("one_hot").tolist() == [2 * S] * K + [0] * (E - K)


@pytest.mark.parametrize("layer", [0, 5])
def test_zipf_weighs_experts_by_one_over_their_rank(layer: int) -> None:
    shares = loads("zipf", layer, top_k=1).roll(-layer) / (2 * S)
    weights = 1 / torch.arange(1, E + 1)
    torch.testing.assert_close(shares, weights / weights.sum(), rtol=0.25, atol=0.005)
    assert bool((loads("zipf", layer).roll(-layer).diff() < 100).all()), "drawn without replacement: flatter"


def test_zipf_differs_between_layers() -> None:
    assert not torch.equal(choices("zipf", 0).roll(1, dims=-1), choices("zipf", 1))
    assert not torch.equal((choices("zipf", 0) + 1) % E, choices("zipf", 1)), "more than renamed experts"
