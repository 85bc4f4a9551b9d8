"""Rotary embeddings: rotations, relative, in both layouts; YaRN's frequencies from its paper's formulas."""

from __future__ import annotations

import math

import pytest
import torch

from automoe.config.schema import RopeConfig
from automoe.kernels.rotation import inverse_frequencies, rotary_cos_sin, rotate, softmax_scale, yarn_mscale

D = 16
PLAIN = RopeConfig(theta=10000.0)
YARN = RopeConfig(theta=10000.0, scaling="yarn", factor=40.0, original_seq_len=4096, mscale=1.0, mscale_all_dim=1.0)


def rotated(x: torch.Tensor, position: int, config: RopeConfig = PLAIN) -> torch.Tensor:
    cos, sin = rotary_cos_sin(config, D, torch.tensor([[position]]), torch.float64)
    return rotate(x.view(1, 1, 1, D), cos, sin, config.interleaved).flatten()


@pytest.fixture
def q_and_k() -> torch.Tensor:
    return torch.randn(2, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_every_pair_turns_by_position_times_its_frequency() -> None:
    for i in range(D // 2):
        x = torch.zeros(D, dtype=torch.float64)
        x[i] = 1.0
        angle = 7 * 10000.0 ** (-2 * i / D)
        y = rotated(x, 7)
        assert y[i].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert y[i + D // 2].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert y.norm().item() == pytest.approx(1.0, rel=1e-6)


def test_position_zero_turns_nothing(q_and_k: torch.Tensor) -> None:
    assert torch.equal(rotated(q_and_k[0], 0), q_and_k[0])


@pytest.mark.parametrize("config", [PLAIN, RopeConfig(interleaved=True), YARN], ids=["halves", "pairs", "yarn"])
def test_products_depend_on_the_distance_alone(q_and_k: torch.Tensor, config: RopeConfig) -> None:
    q, k = q_and_k
    near, far = (rotated(q, at + 5, config) @ rotated(k, at, config) for at in (3, 40))
    other = rotated(q, 43, config) @ rotated(k, 40, config)
    assert near.item() == pytest.approx(far.item(), rel=1e-4)
    assert abs(near.item() - other.item()) > 1e-2


def test_pairs_are_halves_of_permuted_dims(q_and_k: torch.Tensor) -> None:
    x = q_and_k[0]
    halves = torch.cat((x[0::2], x[1::2]))
    assert torch.equal(rotated(x, 9, RopeConfig(interleaved=True)), rotated(halves, 9))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_back_undoes_a_rotation_of_some_dims(interleaved: bool) -> None:
    """The layout comes back too, and gradients turn the other way."""
    x, upstream = torch.randn(2, 1, 3, 2, D + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    cos, sin = rotary_cos_sin(PLAIN, D, torch.tensor([[4, 9, 2]]), torch.float64)
    there = rotate(x, cos, sin, interleaved, 3)
    again = rotate(there, cos, sin, interleaved, 3, back=True)
    assert not torch.equal(there, x)
    torch.testing.assert_close(again, x, rtol=0, atol=1e-6)  # angles are float32
    (gradient,) = torch.autograd.grad(again, x, upstream)
    torch.testing.assert_close(gradient, upstream, rtol=0, atol=1e-6)


def test_yarn_keeps_fast_dims_stretches_slow_ones_and_blends_between() -> None:
    """Arithmetic of the paper in double precision: rotations over the original context decide (eq. 17-19)."""
    dim = 64
    got, scale = inverse_frequencies(YARN, dim, torch.device("cpu"))
    plain = [10000.0 ** (-2 * i / dim) for i in range(dim // 2)]

    def dim_of(rotations: float) -> float:
        return dim * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = math.floor(dim_of(32)), math.ceil(dim_of(1))
    assert 0 < low < high < dim // 2
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected = frequency * (1 - ramp) + frequency / 40 * ramp
        assert got[i].item() == pytest.approx(expected, rel=1e-5)
    assert got[low].item() == pytest.approx(plain[low], rel=1e-5)
    assert got[high].item() == pytest.approx(plain[high] / 40, rel=1e-5)
    assert scale == 1.0  # equal mscale and mscale_all_dim cancel


def test_yarn_temperature() -> None:
    assert yarn_mscale(40.0, 1.0) == pytest.approx(0.1 * math.log(40) + 1)
    assert yarn_mscale(1.0, 1.0) == 1.0
    _, scale = inverse_frequencies(RopeConfig(scaling="yarn", factor=4.0, original_seq_len=64), D, torch.device("cpu"))
    assert scale == pytest.approx(0.1 * math.log(4) + 1)  # no mscale given: the paper's own


def test_softmax_scale() -> None:
    assert softmax_scale(PLAIN, 192) == pytest.approx(192**-0.5)
    assert softmax_scale(YARN, 192) == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_angles_are_float32_even_in_float64() -> None:
    """Published checkpoints were trained with float32 angles; float64 runs must use the same ones."""
    positions = torch.tensor([[1000]])
    wide, _ = rotary_cos_sin(PLAIN, D, positions, torch.float64)
    narrow, _ = rotary_cos_sin(PLAIN, D, positions, torch.float32)
    assert torch.equal(wide.float(), narrow)
