"""Matrices in bytes: what each number becomes, where they may be cut, and what their products keep."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch
import torch.nn.functional as F

from automoe.config.schema import LoraConfig
from automoe.errors import BackendError
from automoe.hf.quantized import dequantize_fp8, quantize_fp8
from automoe.kernels.activation import ClampedSwiGLU
from automoe.moe.lora import PRODUCTS, ExpertLora
from automoe.quantize import packed
from automoe.quantize.packed import linear, pack_fp8, pack_nf4, unpack
from tests.support.experts import flat

# Quantiles of a normal distribution, arXiv 2305.14314, appendix E.
NF4 = """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
    -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1


def packed_fp8(numbers: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_fp8(numbers)
    return pack_fp8(codes, scales[torch.arange(numbers.shape[0]) // 128])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fp8_is_what_a_load_dequantizes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_CHUNK", 1 << 13)  # several steps
    codes, scales = quantize_fp8(normal(300, 200))
    stored = packed_fp8(normal(300, 200))
    assert stored.shape == (300, 2, 132)
    assert torch.equal(unpack(stored, 200, dtype), dequantize_fp8(codes, scales).to(dtype))


def test_nf4_is_the_nearest_of_sixteen_numbers_times_the_largest_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, table = normal(3, 6, 160), torch.tensor([float(word) for word in NF4.split()])
    numbers[0, 0, :64] = 0
    blocks = F.pad(numbers, (0, 32)).unflatten(-1, (3, 64))
    scales = blocks.abs().amax(-1, keepdim=True)
    share = torch.where(scales > 0, blocks / scales, 0.0)
    nearest = table[(share.unsqueeze(-1) - table).abs().argmin(-1)] * scales
    stored = pack_nf4(numbers)
    assert stored.shape == (3, 6, 3, 36)
    assert torch.equal(unpack(stored, 160, torch.float32), nearest.flatten(-2)[..., :160])
    monkeypatch.setattr(packed, "_CHUNK", 200)
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(unpack(stored, 160, dtype), nearest.flatten(-2)[..., :160].to(dtype))


@pytest.mark.parametrize(("pack", "size"), [(packed_fp8, 128), (pack_nf4, 64)])
def test_a_cut_between_rows_or_blocks_cuts_codes_and_scales_alike(pack, size: int) -> None:
    stored = pack(normal(8, 4 * size))
    whole = unpack(stored, 4 * size, torch.float32)
    assert torch.equal(unpack(stored[3:7], 4 * size, torch.float32), whole[3:7])
    part = unpack(stored[:, 1:3], 2 * size, torch.float32)
    assert torch.equal(part, whole[:, size : 3 * size])
    assert unpack(stored[:0], 4 * size, torch.float32).shape == (0, 4 * size)


def kept_bytes(compute) -> tuple[torch.Tensor, int]:
    """The result, and the bytes that the backward pass keeps for it."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = compute()
    return out, sum(kept.values())


@pytest.mark.parametrize("pack", [packed_fp8, pack_nf4])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_wide_weight_and_keeps_bytes_alone(pack, biased: bool) -> None:
    stored, bias = pack(normal(96, 256)), normal(96).requires_grad_() if biased else None
    wide = unpack(stored, 256, torch.float32)
    x, grad = normal(2, 3, 256).requires_grad_(), normal(2, 3, 96)
    leaves = [x] if bias is None else [x, bias]
    out, kept = kept_bytes(lambda: linear(x, stored, bias))
    expected = F.linear(x, wide, bias)
    assert torch.equal(out, expected) and kept == stored.nbytes < wide.nbytes / 3
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "shapes", [{}, {"A13": (4, 8, 64), "B13": (4, 2, 128, 8), "A2": (4, 8, 128), "B2": (4, 64, 8)}]
)
def test_experts_are_those_of_the_wide_weights_and_keep_bytes_alone(shapes: dict[str, tuple[int, ...]]) -> None:
    up, down = pack_nf4(normal(4, 2, 128, 64)), pack_nf4(normal(4, 64, 128))
    wide = unpack(up, 64, torch.float32), unpack(down, 128, torch.float32)
    made = ExpertLora("layers.0.mlp.experts", LoraConfig(rank=8), 0, shapes, PRODUCTS["grouped_mm"])
    for parameter in made.parameters():
        parameter.data = normal(*parameter.shape)
    x, probs = normal(12, 64).requires_grad_(), normal(20).abs().requires_grad_()
    rows = torch.arange(20) % 12, torch.tensor([5, 5, 9, 20], dtype=torch.int32), probs
    biases = normal(4, 2, 128), normal(4, 64)
    activation = ClampedSwiGLU(1.702, 0.5)
    leaves = [x, probs, *made.parameters()]
    out, kept = kept_bytes(lambda: flat(made)(x, *rows, up, down, *biases, activation=activation))
    expected, more = kept_bytes(lambda: flat(made)(x, *rows, *wide, *biases, activation=activation))
    assert torch.equal(out, expected) and more - kept == sum(w.nbytes for w in wide) - up.nbytes - down.nbytes
    grad = normal(20, 64)
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__
    for name in [name for name in sys.modules if name.startswith("bitsandbytes")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(BackendError, match="lora.base=nf4: bitsandbytes.*pip install bitsandbytes"):
        pack_nf4(normal(2, 64))
