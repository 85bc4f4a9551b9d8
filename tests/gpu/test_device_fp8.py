"""Products of 8-bit operands on the device against float64 of the same codes, and a small model that learns with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_models import relative, small

from automoe.comm.tokens import StepBatch
from automoe.moe.dispatch.wire import decode_rows, encode_rows
from automoe.moe.quantized import _spread_rows, grouped_product, whole_tiles
from automoe.quantize.formats import BLOCK, E4M3, E5M2, LINE, WHOLE, Quantized, dequantize, quantize
from automoe.quantize.linear import scaled_product
from tests.support.trajectories import run_trajectory

# Operands are the same, so what is left is how a kernel sums: Hopper's 8-bit units keep fewer bits than float32.
TOLERANCE = {("cpu", torch.float32): 1e-6, ("cuda", torch.float32): 2e-3}
BF16 = 5e-3
SIZES = {"cpu": (150, 72, 200), "cuda": (4096, 2112, 7168)}
COUNTS = {"cpu": [40, 0, 130, 1], "cuda": [3000, 0, 1, 1095, 512, 0]}


def numbers(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))
    sizes = torch.logspace(-4, 4, shape[-2], base=2).unsqueeze(1)  # scales that differ
    return (rows * sizes).to(device)


def exact(q: Quantized) -> torch.Tensor:
    """In float64, of codes and scales as the CPU spreads them."""
    return dequantize(Quantized(q.codes.cpu(), q.scales.cpu(), q.tile)).double()


def bound(device: torch.device, dtype: torch.dtype) -> float:
    return TOLERANCE[device.type, dtype] if dtype == torch.float32 else BF16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", [(WHOLE, WHOLE), (LINE, BLOCK), (LINE, LINE)], ids=str)
def test_a_product(device: torch.device, dtype: torch.dtype, tiles: tuple) -> None:
    rows, cols, summed = SIZES[device.type]
    for first in (E4M3, E5M2) if tiles[0] == WHOLE else (E4M3,):
        a = quantize(numbers(device, rows, summed), first, tiles[0])
        b = quantize(numbers(device, cols, summed, seed=1), E4M3, tiles[1])
        got = scaled_product(a, b, dtype)
        assert got.device.type == device.type and got.dtype == dtype
        assert relative(got, exact(a) @ exact(b).T) < bound(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", [(WHOLE, WHOLE), (LINE, BLOCK)], ids=str)
def test_grouped_products(device: torch.device, dtype: torch.dtype, tiles: tuple) -> None:
    counts = COUNTS[device.type]
    offsets = torch.tensor(counts).cumsum(0).int()
    cols, summed = (256, 2048) if device.type == "cuda" else (96, 144)
    x = numbers(device, sum(counts), summed)
    a, w = quantize(x, E4M3, tiles[0]), quantize(numbers(device, len(counts), cols, summed), E4M3, tiles[1])
    got = grouped_product(a, w, offsets.to(device), dtype)
    groups = zip(exact(a).split(counts), exact(w), strict=True)
    # torch's own grouped product gives bfloat16 whatever is asked for.
    loose = BF16 if device.type == "cuda" and tiles[0] == WHOLE else bound(device, dtype)
    assert relative(got, torch.cat([rows @ weight.T for rows, weight in groups])) < loose

    place, ends, size = whole_tiles(offsets.to(device), len(x))
    grad = numbers(device, sum(counts), cols, seed=1)
    lines = [quantize(_spread_rows(t, place, size).T, E4M3, tiles[0]) for t in (grad, x)]
    got = grouped_product(*lines, ends, dtype)
    starts = [0, *ends.tolist()]
    for expert, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        expected = exact(lines[0])[:, start:end] @ exact(lines[1])[:, start:end].T
        if counts[expert] == 0:
            assert not got[expert].any()
        else:
            assert relative(got[expert], expected) < loose


@pytest.mark.parametrize("hidden", [130, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_on_their_way_to_experts(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    """Every bit of codes, scales and numbers is the CPU's."""
    x = numbers(torch.device("cpu"), 300, hidden).to(dtype)
    x[3], x[4, 0], x[5, -1] = 0, torch.nan, torch.inf
    lines = encode_rows(x.to(device))
    assert lines.device.type == device.type
    here = decode_rows(lines, hidden, dtype).cpu()
    torch.testing.assert_close(here, decode_rows(encode_rows(x), hidden, dtype), rtol=0, atol=0, equal_nan=True)
    assert decode_rows(encode_rows(x[:0].to(device)), hidden, dtype).shape == (0, hidden)


def repeated(config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    seq_len, rows = config.train.seq_len, config.train.global_batch_size
    tokens = torch.randint(64, (rows, seq_len + 1), generator=torch.Generator().manual_seed(3))
    index = torch.arange(seq_len).expand(rows, seq_len)
    return StepBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), index, torch.zeros_like(index), 0, 0)


# On the CPU tests/quantize has it.
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("mode", ["tensorwise", "delayed", "blockwise"])
def test_a_model_learns_as_it_does_without(device: torch.device, mode: str) -> None:
    plain = small("deepseek_v3", "bfloat16")
    plain = replace(plain, model=replace(plain.model, moe_intermediate_size=128))
    eight = replace(plain, train=replace(plain.train, fp8=mode))
    expected, got = (
        run_trajectory(each, repeated, 8, keep_tensors=False, device=device.type).losses for each in (plain, eight)
    )
    assert expected[-1] < 0.95 * expected[0]
    assert got != expected
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 0.05 * expected[0]
