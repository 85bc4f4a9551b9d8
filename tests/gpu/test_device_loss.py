"""The kernels of the loss and of the gradient norm on the device, against float64."""

from __future__ import annotations

import pytest
import torch
from device_models import relative

from automoe.comm.tokens import IGNORE
from automoe.kernels.squares import sum_of_squares
from automoe.model.loss import chunk_loss_fn, cross_entropy_sum

SIZES = {"cpu": (37, 16, 5001), "cuda": (2049, 1024, 151_936)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_cross_entropy_in_two_passes(device: torch.device, dtype: torch.dtype) -> None:
    """The loss, both gradients and the number of labels that are likeliest; some tokens are not trained."""
    tokens, hidden, vocabulary = SIZES[device.type]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[:2], labels[3], labels[5] = torch.tensor([0, vocabulary - 1]), IGNORE, (x[5] @ weight.T).argmax()

    def run(kernel: str, to: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [leaf.to(to, dtype, copy=True).requires_grad_() for leaf in (x, weight)]
        hits = torch.zeros((), dtype=torch.int64, device=to)
        loss = cross_entropy_sum(*leaves, labels.to(to), chunk_fn=chunk_loss_fn(kernel), hits=hits)
        loss.backward()
        return [loss, *(leaf.grad for leaf in leaves), hits]

    wide = torch.device("cpu") if device.type == "cpu" else device
    *expected, expected_hits = run("torch", wide, torch.float64)
    *got, hits = run("triton", device, dtype)
    for name, mine, theirs in zip(("loss", "dx", "dweight"), got, expected, strict=True):
        assert relative(mine, theirs) < TOLERANCE[dtype], name
    assert hits.item() == expected_hits.item() >= 1 or dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("value", [1.0, 1e-25, 1e25])
def test_squares_are_summed_in_float64(device: torch.device, dtype: torch.dtype, value: float) -> None:
    """Squares that float32 has no room for too, a last block that is not full, and a gradient that is not dense."""
    count = {"cpu": 70_001, "cuda": 50_000_001}[device.type]
    numbers = (torch.randn(count, generator=torch.Generator().manual_seed(1)) * value).to(device, dtype)
    for each in (numbers, numbers[: count // 2 * 2].view(2, -1).T):
        expected = each.double().square().sum().item()
        assert sum_of_squares(each).item() == pytest.approx(expected, rel=1e-12)
    assert sum_of_squares(numbers[:0]).item() == 0
    numbers[7] = torch.inf
    assert sum_of_squares(numbers).item() == torch.inf
