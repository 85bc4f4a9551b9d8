"""Entries of windows and the attention to them on the device, against dense formulas in float64."""

from __future__ import annotations

import pytest
import torch
from device_models import relative

from automoe.kernels import compressed_attention as kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # bfloat16: shares and their gradients are rounded for products
SIZES = {"cpu": (2, 41, 3, 16, 5), "cuda": (2, 1500, 16, 512, 128)}  # rows, positions, heads, head dim, window
WIDTH = 4


def exact_attention(
    q: torch.Tensor, kv: torch.Tensor, entries: torch.Tensor, sinks: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """The softmax over all positions, entries and sinks at once; ``seen`` [B, S, R + E]."""
    keys = torch.cat((kv, entries), dim=1)
    scores = torch.einsum("bsnd,bkd->bsnk", q, keys) * scale
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    scores = torch.cat((scores, sinks[:, None].expand(*scores.shape[:3], 1)), dim=-1)
    return torch.einsum("bsnk,bkd->bsnd", scores.softmax(-1)[..., :-1], keys)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("documents", [False, True])
def test_output_and_gradients_are_those_of_one_dense_softmax(
    device: torch.device, dtype: torch.dtype, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs have the same bits."""
    num_rows, size, heads, dim, window = SIZES[device.type]
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "CHUNK", 16)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    index = torch.arange(size, device=device).expand(num_rows, size)
    start = size // 3
    doc_ids = (index >= start).long() if documents else None
    positions = torch.where(index >= start, index - start, index) if documents else index
    windows = kernels.windows_of(positions, doc_ids, WIDTH)
    kv, gate, bias = normal(num_rows, size, 2 * dim), normal(num_rows, size, 2 * dim), normal(WIDTH, 2 * dim)
    q, sinks = normal(num_rows, size, heads, dim), normal(heads)
    grad = torch.randn(q.shape, generator=generator).to(device, dtype)
    given = q, kv, gate, bias, sinks
    back = index[:, :, None] - index[:, None]
    near = (back >= 0) & (back < window)
    if doc_ids is not None:
        near = near & (doc_ids[:, :, None] == doc_ids[:, None])
    seen = torch.cat((near, windows.seen_BSE), dim=-1)
    scale = dim**-0.5

    def run() -> list[torch.Tensor]:
        entries = kernels.pool_windows(kv, gate, bias, windows, True)
        arguments = windows.seen_BSE, sinks, doc_ids, window, scale
        out = kernels.attend_entries(q, kv[..., :dim].contiguous(), entries, *arguments)
        return [out, *torch.autograd.grad(out, given, grad)]

    wide = [x.detach().double().requires_grad_() for x in given]
    entries = kernels.pool_windows(*wide[1:4], windows, True)
    out = exact_attention(wide[0], wide[1][..., :dim], entries, wide[4], seen, scale)
    expected = [out, *torch.autograd.grad(out, wide, grad.double())]
    got, again = run(), run()
    for name, mine, theirs in zip(("out", "q", "kv", "gate", "bias", "sinks"), got, expected, strict=True):
        assert relative(mine, theirs) < TOLERANCE[dtype] * (1 if name == "out" else 2), name
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
