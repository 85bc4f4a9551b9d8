"""``optim.master_weights=stochastic`` on the device: the kernel's update is that of plain torch to the bit."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

import automoe.optim.stochastic
from automoe.config.schema import OptimConfig
from automoe.optim.adamw import build_optimizer
from automoe.optim.stochastic import update_in_torch, update_in_triton

SHAPES = {"cpu": (3, 2, 5, 48), "cuda": (16, 2, 512, 2048)}


def updated(update, device: torch.device, dtype: torch.dtype, moments: str) -> list[torch.Tensor]:
    """A parameter and its moments after three steps, all made by ``update``."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(SHAPES[device.type], generator=generator).to(device, dtype)

    model = nn.Module()
    model.weight = nn.Parameter(normal())
    config = OptimConfig(lr=1e-3, master_weights="stochastic", moments=moments)
    optimizer = build_optimizer([model], config)
    with (
        patch.object(automoe.optim.stochastic, "update_in_torch", update),
        patch.object(automoe.optim.stochastic, "update_in_triton", update),
    ):
        for _ in range(3):
            model.weight.grad = normal()
            optimizer.step()
    state = optimizer.state[model.weight]
    return [model.weight.detach(), state["exp_avg"], state["exp_avg_sq"]]


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.bfloat16, "float32"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32")],
    ids=["bfloat16", "bfloat16, moments too", "float32"],
)
def test_an_update_in_one_pass_is_that_of_plain_torch(device: torch.device, dtype: torch.dtype, moments: str) -> None:
    plain, fused = (updated(update, device, dtype, moments) for update in (update_in_torch, update_in_triton))
    assert [tensor.dtype for tensor in plain] == [dtype, *[getattr(torch, moments)] * 2]
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
