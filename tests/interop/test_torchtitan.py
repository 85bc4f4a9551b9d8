"""What is taken from torchtitan, and how its absence is told. Its gradient norm: tests/optim/test_grad_norm.py."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from automoe.errors import BackendError
from automoe.interop.torchtitan import peak_flops
from tests.support.titan_norm import titan_grad_norm


def test_peak_flops_of_known_devices() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12


@pytest.mark.parametrize("name", ["cpu", "NVIDIA GeForce RTX 4090"])
def test_an_unknown_device_is_unknown_and_not_an_a100(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert peak_flops(name) is None
    assert "fallback" not in "".join(capfd.readouterr())


def test_gradients_keep_their_values() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)
    assert titan_grad_norm(parameters).item() == 4.0
    assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))


def test_absence_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.tools.utils", None)
    with pytest.raises(BackendError, match=r"torchtitan\.tools\.utils does not import .*install torchtitan"):
        peak_flops("NVIDIA H200")
