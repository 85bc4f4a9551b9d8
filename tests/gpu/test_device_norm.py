"""RMSNorm's kernels on the device, against torch's norm in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from device_models import relative

from automoe.kernels.rms_norm import _TritonRMSNorm

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}  # one rounding of the result
SHAPES = {
    "cpu": [(37, 24), (5, 8192), (1, 3)],
    "cuda": [(65_536, 128), (8191, 7168), (4097, 1536), (3, 16_384), (1, 3)],
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_norm_and_both_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """Rows of any width, some of them a part of wider rows or laid out by columns; two runs have the same bits."""
    generator = torch.Generator().manual_seed(0)
    for num_rows, dim in SHAPES[device.type]:
        wider = torch.randn(num_rows, dim + 8, generator=generator).to(device, dtype)
        weight = torch.rand(dim, generator=generator).to(device).requires_grad_()
        grad = torch.randn(num_rows, dim, generator=generator).to(device, dtype)
        for x in (wider[:, 8:], wider[:, :dim].contiguous(), wider[:, :dim].T.contiguous().T):
            x = x.detach().requires_grad_()
            exact = x.detach().double().requires_grad_()
            wide_weight = weight.detach().double().requires_grad_()
            out = F.rms_norm(exact, (dim,), wide_weight, EPS)
            expected = [out, *torch.autograd.grad(out, (exact, wide_weight), grad.double())]

            def run() -> list[torch.Tensor]:
                out = _TritonRMSNorm.apply(x, weight, EPS)  # noqa: B023
                return [out, *torch.autograd.grad(out, (x, weight), grad)]  # noqa: B023

            got, again = run(), run()
            for name, mine, theirs in zip(("out", "dx", "dweight"), got, expected, strict=True):
                tolerance = TOLERANCE[dtype] if name != "dweight" else 1e-5
                assert relative(mine, theirs) < tolerance, (name, num_rows, dim)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_no_rows(device: torch.device) -> None:
    x = torch.zeros(0, 16, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)
    out = _TritonRMSNorm.apply(x, weight, EPS)
    of_x, of_weight = torch.autograd.grad(out, (x, weight), torch.zeros_like(out))
    assert out.shape == of_x.shape == (0, 16) and not of_weight.any()
