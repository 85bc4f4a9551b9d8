"""RMSNorm on the CPU is our own Function: the formula, its gradients, and any cut into blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from automoe.kernels import activation
from automoe.kernels.rms_norm import _RMSNorm, _TritonRMSNorm
from automoe.model.norm import RMSNorm


def norm_with_weight(dim: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(dim, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    return norm


@pytest.mark.parametrize("block_elements", [1, 16, 1 << 17])  # a row, two rows and a rest, all rows
def test_value_and_gradients_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, block_elements: int) -> None:
    monkeypatch.setattr(activation, "BLOCK_ELEMENTS", block_elements)
    torch.manual_seed(0)
    norm = norm_with_weight(8, torch.float64)
    x = torch.randn(3, 5, 12, dtype=torch.float64)[..., 2:10].requires_grad_()  # rows with gaps between them
    grad = torch.randn(3, 5, 8, dtype=torch.float64)
    got = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    reference = F.rms_norm(x, (8,), norm.weight, norm.eps)
    torch.testing.assert_close(norm(x), reference, rtol=1e-14, atol=1e-14)
    for ours, theirs in zip(got, torch.autograd.grad(reference, (x, norm.weight), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_bfloat16_is_normalised_in_float32() -> None:
    torch.manual_seed(0)
    norm = norm_with_weight(64, torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    exact = F.rms_norm(x.float(), (64,), norm.weight.float(), norm.eps)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), exact.bfloat16())


@pytest.mark.parametrize(("num_rows", "width"), [(0, 4), (1, 4), (10, 4), (3, 1 << 20)])
def test_blocks_cover_every_row_once_in_order(num_rows: int, width: int) -> None:
    rows = torch.arange(num_rows)
    seen = [rows[block] for block in activation.row_blocks(num_rows, width, torch.device("cpu"))]
    assert torch.equal(torch.cat([rows[:0], *seen]), rows)
    assert len(list(activation.row_blocks(num_rows, width, torch.device("cuda")))) == (num_rows > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_path_over_kernels_is_the_same_function_and_keeps_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8).to(dtype).requires_grad_()
    weight, grad = torch.randn(8, requires_grad=True), torch.randn(6, 8).to(dtype)
    results = []
    for norm in (_RMSNorm, _TritonRMSNorm):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t) or t, lambda t: t):
            out = norm.apply(x, weight, 1e-5)
        assert {(t.shape, t.dtype) for t in saved} == {((6, 8), dtype), ((8,), torch.float32), ((6, 1), torch.float32)}
        results.append((out, *torch.autograd.grad(out, (x, weight), grad)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(theirs, ours, rtol=1e-2 if ours.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
