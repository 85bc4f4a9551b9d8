"""Attention kernels on the device against the scores written out in float64, at MLA's head dims and at equal ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from device_models import relative
from torch.nn.attention import flex_attention

from automoe.comm.communicators import SINGLE_RANK
from automoe.comm.tokens import Tokens
from automoe.kernels.attention import attend_in_blocks, attention_fn, prepare_cuda
from automoe.model.attention_masks import block_masks, dense_masks
from automoe.model.rows import head_tail_index
from automoe.parallel.compile import compiled
from tests.support.rows import PartOfRows

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


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=["mla", "equal"])
@pytest.mark.parametrize(("window", "with_sinks"), [(0, False), (150, True)], ids=["documents", "windows and sinks"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_of_scores_equal_the_float64_scores(
    device: torch.device, dims: tuple[int, int], window: int, with_sinks: bool, num_ranks: int
) -> None:
    """Of rows of 640 positions, or of the second rank's part of them; compiled on CUDA, where it also repeats to the bit."""
    length, generator, dtype = 640, torch.Generator().manual_seed(0), DTYPES[device.type]
    docs = torch.tensor([[0] * 100 + [1] * 333 + [2] * 150 + [-1] * 57, [0] * 640])
    index = head_tail_index(length, num_ranks, num_ranks - 1).expand(2, -1)
    keys = PartOfRows(num_ranks - 1, num_ranks, docs) if num_ranks > 1 else SINGLE_RANK
    tokens = Tokens(index, index, docs.gather(1, index), torch.tensor(2 * length))
    shapes = [(2, index.shape[1], 4, dims[0]), (2, length, 2, dims[0]), (2, length, 2, dims[1]), (4,)][: 3 + with_sinks]
    args = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    upstream = torch.randn(2, index.shape[1], 4, dims[1], generator=generator).to(dtype)

    def run(fn, masks, **to) -> list[torch.Tensor]:
        leaves = [x.to(**to, copy=True).requires_grad_() for x in args]
        where = to.get("device", "cpu")
        here = replace(tokens, **{name: getattr(tokens, name).to(where) for name in ("index", "doc_ids")})
        if num_ranks > 1:
            keys.whole = docs.to(where)
        out = [
            fn(leaves[0][:, q], leaves[1][:, kv], leaves[2][:, kv], mask, dims[0] ** -0.5, *leaves[3:])
            for q, kv, mask in masks(here, keys, window, True)
        ]
        return [torch.cat(out, dim=1), *torch.autograd.grad(torch.cat(out, dim=1), leaves, upstream.to(**to))]

    expected = run(attention_fn("math"), dense_masks, dtype=torch.float64)
    fn = compiled(attend_in_blocks) if device.type == "cuda" else attend_in_blocks
    with patch.object(flex_attention, "_validate_device", lambda *heads: None):  # the CPU has gradients all the same
        got, again = (run(fn, block_masks, device=device) for _ in range(2))
    for one, other, exact in zip(got, again, expected, strict=True):
        assert relative(one, exact) < TOLERANCE[dtype] and torch.equal(one, other)


@pytest.mark.gpu
def test_others_keep_the_order_that_torch_has_by_itself() -> None:
    """In processes of their own: torch sets it up once."""
    code = """
import sys, torch, torch.nn.functional as F
from torch.nn.attention import _cur_sdpa_kernel_backends
from automoe.kernels.attention import attention_fn
from automoe.kernels.attention import prepare_cuda
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
