"""Peaks of GPUs, beside torchtitan's table and the clusters of plans. torchtitan's norm: tests/optim/test_grad_norm.py."""

from __future__ import annotations

import subprocess

import pytest
import torch
from torch import nn
from torchtitan.tools.utils import get_peak_flops

from automoe.config.compose import compose_config, list_options
from automoe.interop.peak_flops import peak_flops
from tests.support.titan_norm import titan_grad_norm

NAMES = """NVIDIA A100-SXM4-80GB,NVIDIA RTX A6000,NVIDIA H100 NVL,NVIDIA H100 PCIe,NVIDIA H100 80GB HBM3,NVIDIA H200,\
NVIDIA H20,NVIDIA GB200,NVIDIA GB300,NVIDIA B200,NVIDIA B300 SXM6 AC,AMD Instinct MI250X,AMD Instinct MI300X,\
AMD Instinct MI325X,AMD Instinct MI355X""".split(",")


@pytest.mark.parametrize("name", NAMES)
def test_torchtitan_has_the_same_peaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lspci(*_: object, **__: object) -> None:  # it would answer for the card of this machine
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", no_lspci)
    assert peak_flops(name) == pytest.approx(get_peak_flops(name), rel=0.01)


def test_plans_have_the_same_peaks() -> None:
    clusters = [compose_config(overrides=[f"cluster={name}"]).cluster for name in list_options("cluster")]
    known = [cluster for cluster in clusters if peak_flops(cluster.gpu)]
    assert len(known) >= 6
    assert {c.name: c.peak_flops for c in known} == {c.name: peak_flops(c.gpu) for c in known}


@pytest.mark.parametrize("name", ["cpu", "NVIDIA GeForce RTX 4090"])
def test_an_unknown_device_is_unknown_and_not_an_a100(name: str) -> None:
    assert peak_flops(name) is None


def test_gradients_keep_their_values() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)
    assert titan_grad_norm(parameters).item() == 4.0
    assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))
