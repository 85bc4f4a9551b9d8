"""Peaks of GPUs, beside torchtitan's table and the clusters of plans."""

from __future__ import annotations

import subprocess

import pytest

from automoe.config.compose import list_options
from automoe.observe.peak_flops import peak_flops
from tests.support.configurations import quick_config

NAMES = """NVIDIA A100-SXM4-80GB,NVIDIA RTX A6000,NVIDIA H100 NVL,NVIDIA H100 PCIe,NVIDIA H100 80GB HBM3,NVIDIA H200,\
NVIDIA H20,NVIDIA GB200,NVIDIA GB300,NVIDIA B200,NVIDIA B300 SXM6 AC,AMD Instinct MI250X,AMD Instinct MI300X,\
AMD Instinct MI325X,AMD Instinct MI355X""".split(",")


@pytest.mark.parametrize("name", NAMES)
def test_torchtitan_has_the_same_peaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.tools.utils import get_peak_flops  # not on every machine with a GPU

    def no_lspci(*_: object, **__: object) -> None:  # it would answer for the card of this machine
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", no_lspci)
    assert peak_flops(name) == pytest.approx(get_peak_flops(name), rel=0.01)


def test_plans_have_the_same_peaks() -> None:
    clusters = [quick_config(overrides=[f"cluster={name}"]).cluster for name in list_options("cluster")]
    known = [cluster for cluster in clusters if peak_flops(cluster.gpu)]
    assert len(known) >= 6
    assert {c.name: c.peak_flops for c in known} == {c.name: peak_flops(c.gpu) for c in known}


@pytest.mark.parametrize("name", ["cpu", "NVIDIA GeForce RTX 4090"])
def test_an_unknown_device_is_unknown_and_not_an_a100(name: str) -> None:
    assert peak_flops(name) is None
