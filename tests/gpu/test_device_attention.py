"""Attention kernels on the device against the scores written out in float64, at MLA's head dims and at equal ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from device_models import relative

from automoe.model.attention_kernels import attention_fn, prepare_cuda

KERNELS = {"cpu": ["sdpa", "flash", "math"], "cuda": ["sdpa", "cudnn", "flash", "math"]}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=["mla", "equal"])
def test_every_kernel_equals_the_float64_scores(device: torch.device, dims: tuple[int, int]) -> None:
    generator, dtype = torch.Generator().manual_seed(0), DTYPES[device.type]
    rows, heads = (2, 37, 4), {"q": dims[0], "k": dims[0], "v": dims[1]}
    args = [torch.randn(*rows, dim, generator=generator).to(dtype) for dim in heads.values()]
    upstream = torch.randn(*rows, dims[1], generator=generator).to(dtype)

    def run(name: str, to: dict) -> list[torch.Tensor]:
        leaves = [x.to(**to, copy=True).requires_grad_() for x in args]
        out = attention_fn(name)(*leaves, None, dims[0] ** -0.5)
        return [out, *torch.autograd.grad(out, leaves, upstream.to(**to))]

    if device.type == "cuda":
        prepare_cuda()
    expected = run("math", dict(dtype=torch.float64))
    for name in KERNELS[device.type]:
        for part, got, exact in zip(("out", *heads), run(name, dict(device=device)), expected, strict=True):
            assert relative(got, exact) < TOLERANCE[dtype], (name, part)


@pytest.mark.gpu
def test_others_keep_the_order_that_torch_has_by_itself() -> None:
    """In processes of their own: torch sets it up once."""
    code = """
import sys, torch, torch.nn.functional as F
from torch.nn.attention import _cur_sdpa_kernel_backends
from automoe.model.attention_kernels import attention_fn
from automoe.model.attention_kernels import prepare_cuda
x = torch.zeros(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
if sys.argv[1] == "ours first":
    prepare_cuda()
    attention_fn("sdpa")(x, x, x, None, 0.1)
F.scaled_dot_product_attention(x, x, x)
print([backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)])
"""
    alone, beside = (
        subprocess.run([sys.executable, "-c", code, which], capture_output=True, text=True, check=True).stdout
        for which in ("alone", "ours first")
    )
    assert alone == beside != ""
