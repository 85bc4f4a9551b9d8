"""``parallel.expert_wgrad=fused`` on the device: products add to FSDP's sums what autograd would have added."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_models import relative, rows, small

from automoe.moe.gradient_sums import add_product
from tests.support.trajectories import run_trajectory

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # autograd rounds each product to bfloat16, the sum does not


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_sums_over_micro_batches(device: torch.device, family: str, dtype: str) -> None:
    """Two micro-batches, so that the second product meets the first one's sum."""
    plain = small(family, dtype)
    fused = replace(plain, parallel=replace(plain.parallel, expert_wgrad="fused"))
    ours, autograds = (run_trajectory(config, rows, 1, device=str(device)) for config in (fused, plain))
    assert ours.losses[0] == pytest.approx(autograds.losses[0], rel=1e-6)
    assert ours.gradients[0].keys() == autograds.gradients[0].keys()
    for name, gradient in autograds.gradients[0].items():
        assert relative(ours.gradients[0][name], gradient) <= TOLERANCE[dtype], name


def test_a_product_is_added_unrounded(device: torch.device) -> None:
    """Rows of one expert, among them none at all; a sum so large that rounding to bfloat16 would lose the product."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (512, 3, 0):
        grad, x = (torch.randn(num_rows, n, generator=generator).to(device).bfloat16() for n in (96, 160))
        start = torch.full((96, 160), 1e4).to(device)
        total = start.clone()
        add_product(total, grad, x)
        expected = start.double() + grad.double().T @ x.double()
        assert (total - expected).abs().max() <= 2e-3  # of 1e4 in float32
