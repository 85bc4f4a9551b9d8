"""Codes and scales against their definition, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automoe.kernels.fp8 import encode_in_one_pass
from automoe.quantize.formats import (
    BLOCK,
    E4M3,
    E5M2,
    LARGEST,
    LINE,
    WHOLE,
    dequantize,
    encode,
    quantize,
    scales_for,
    tile_amax,
    transposed,
)

TILES = pytest.mark.parametrize("tile", [WHOLE, LINE, BLOCK], ids=["whole", "line", "block"])
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # of a number: three and two bits of mantissa


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@given(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32), st.sampled_from([E4M3, E5M2]))
def test_a_scale_is_the_smallest_power_of_two_that_holds_the_largest_number(size: float, dtype: torch.dtype) -> None:
    scale = float(scales_for(torch.tensor([size]), dtype))
    assert math.frexp(scale)[0] == 0.5
    assert scale * LARGEST[dtype] >= size > scale / 2 * LARGEST[dtype]


def test_scales_of_nothing_of_the_tiny_and_of_the_infinite() -> None:
    sizes = torch.tensor([0.0, 448.0, 448.0 * 2**-10, 1e-44, math.inf, math.nan])
    assert scales_for(sizes, E4M3)[:4].tolist() == [1.0, 1.0, 2**-10, 2.0**-126]
    assert scales_for(sizes, E4M3)[4:].isnan().all()


@TILES
def test_tiles_are_counted_from_the_first_row_and_column(tile: tuple[int, int]) -> None:
    x = numbers(2, 200, 300)
    got = tile_amax(x, tile)
    high, wide = (200, 300) if tile == WHOLE else tile
    assert got.shape == (2, math.ceil(200 / high), math.ceil(300 / wide))
    for matrix in range(2):
        for row in range(got.shape[1]):
            for col in range(got.shape[2]):
                part = x[matrix, row * high : (row + 1) * high, col * wide : (col + 1) * wide]
                assert got[matrix, row, col] == part.abs().max()


@TILES
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_number_in_range_is_off_by_half_a_step_at_most(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    x = numbers(200, 300)
    got = dequantize(quantize(x, dtype, tile))
    in_range = x.abs() >= 2.0**-8  # far above where e4m3 loses bits: the largest number is about 4
    assert ((got - x).abs() <= HALF_STEP[dtype] * x.abs())[in_range].all()
    assert (got - x)[in_range].abs().max() > 0.9 * HALF_STEP[dtype] / 2 * 2


def test_what_shares_a_tile_does_not_change_how_a_number_is_rounded() -> None:
    x = numbers(256, 256).sign() * numbers(256, 256).abs().clamp(0.5, 4)
    louder = torch.cat((x, 300 * x))
    codes = [dequantize(quantize(t, E4M3, tile))[:256] for t in (x, louder) for tile in (WHOLE, LINE, BLOCK)]
    for other in codes[1:]:
        assert torch.equal(codes[0], other)


@TILES
def test_turned_it_is_the_same_matrix(tile: tuple[int, int]) -> None:
    """Lines are quantized a second time for that, which powers of two make exact."""
    x = numbers(200, 300).clamp(-4, 4)
    x = torch.where(x.abs() < 0.01, 0.01, x)
    q = quantize(x, E4M3, tile)
    turned = transposed(q)
    assert turned.codes.is_contiguous() and turned.tile == tile
    assert torch.equal(dequantize(turned), dequantize(q).T)


def test_out_of_range_is_the_largest_code_but_infinity_is_seen() -> None:
    one = torch.ones(1, 1)
    for dtype, largest in LARGEST.items():
        codes = encode(torch.tensor([[1e6, -1e6, math.inf, math.nan]]), one, dtype, WHOLE).codes.float()
        assert codes[0, :2].tolist() == [largest, -largest]
        assert not codes[0, 2:].isfinite().any()
    assert not dequantize(quantize(torch.tensor([[1.0, math.inf]]), E4M3, LINE)).isfinite().all()


@TILES
@pytest.mark.parametrize("shape", [(0, 300), (300, 0), (0, 0), (3, 0, 128)])
def test_nothing_is_quantized_to_nothing(tile: tuple[int, int], shape: tuple[int, ...]) -> None:
    q = quantize(torch.empty(shape), E4M3, tile)
    assert dequantize(q).shape == shape and dequantize(transposed(q)).shape == (*shape[:-2], shape[-1], shape[-2])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", [(70, 140), (2, 130, 8), (0, 128)])
@pytest.mark.parametrize("tile", [LINE, BLOCK], ids=["line", "block"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_the_kernel_quantizes_to_the_same_numbers(
    shape: tuple[int, ...], tile: tuple[int, int], dtype: torch.dtype
) -> None:
    x = numbers(*shape) * (8 * numbers(1, *shape)[0]).exp2()  # many below the range of their tile
    x[..., :1, :1] = 0
    for turned in (x, x.bfloat16(), x.transpose(-2, -1)):
        expected = quantize(turned, dtype, tile)
        codes, scales = encode_in_one_pass(turned, None, dtype, LARGEST[dtype], tile[0])
        assert torch.equal(scales, expected.scales) and torch.equal(codes.float(), expected.codes.float())
        assert codes.is_contiguous()
        given = 2 * expected.scales
        given[..., :1, :1] /= 64  # out of range
        codes, _ = encode_in_one_pass(turned, given, dtype, LARGEST[dtype], tile[0])
        assert torch.equal(codes.float(), encode(turned, given, dtype, tile).codes.float())


@pytest.mark.parametrize("tile", [LINE, BLOCK], ids=["line", "block"])
def test_the_kernel_hides_nothing_that_is_not_finite(tile: tuple[int, int]) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        x = numbers(130, 130)
        x[129, 129] = bad
        codes, scales = encode_in_one_pass(x, None, E4M3, LARGEST[E4M3], tile[0])
        expected = quantize(x, E4M3, tile)
        assert torch.equal(scales.isnan(), expected.scales.isnan()) and scales.isnan().sum() == 1
        assert torch.equal(codes.float().isnan(), expected.codes.float().isnan())
