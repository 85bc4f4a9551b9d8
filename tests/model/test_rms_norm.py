"""RMSNorm on the CPU is our own Function: the formula, its gradients, and any cut into blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from automoe import blocks
from automoe.model.norm import RMSNorm


def norm_with_weight(dim: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(dim, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    return norm


@pytest.mark.parametrize("block_elements", [1, 16, 1 << 17])  # a row, two rows and a rest, all rows
def test_value_and_gradients_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, block_elements: int) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", block_elements)
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
    seen = [rows[block] for block in blocks.row_blocks(num_rows, width, torch.device("cpu"))]
    assert torch.equal(torch.cat([rows[:0], *seen]), rows)
    assert len(list(blocks.row_blocks(num_rows, width, torch.device("cuda")))) == (num_rows > 0)
