"""Expert backends on the device against the float64 loop: output and every gradient."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from device_models import relative

from automoe.kernels.activation import ClampedSwiGLU
from automoe.moe.dispatch.base import group_ends
from automoe.moe.experts import expert_backend, loop_experts
from tests.support.experts import flat

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# tokens, hidden, width; both widths are multiples of 16 bytes in bfloat16, nothing else is round
BACKENDS = {"cpu": ["grouped_mm"], "cuda": ["grouped_mm", "triton"]}  # tests/moe runs triton's interpreter
SIZES = {"cpu": [(37, 40, 24)], "cuda": [(37, 40, 24), (4093, 2048, 768)]}


def rows_per_expert(kind: str, num_rows: int) -> list[int]:
    """How ``num_rows`` rows are spread over experts."""
    if kind == "random":
        cuts = torch.randint(num_rows + 1, (8,), generator=torch.Generator().manual_seed(3)).sort().values
        return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([num_rows])).tolist()
    return {
        "skewed": [1, num_rows - 3, 0, 1, 1],
        "one expert has all": [0, 0, num_rows, 0],
        "first and last are empty": [0, num_rows // 2, num_rows - num_rows // 2, 0],
        "one row": [0, 1, 0],
        "no row": [0, 0, 0],
    }[kind]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased and clamped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", ["random", "skewed", "one expert has all", "first and last are empty", "one row", "no row"]
)
def test_a_backend_equals_the_float64_loop(device: torch.device, dtype: torch.dtype, kind: str, biased: bool) -> None:
    for name, (num_tokens, hidden, width) in product(BACKENDS[device.type], SIZES[device.type]):
        generator = torch.Generator().manual_seed(0)
        counts = rows_per_expert(kind, 2 * num_tokens)
        num_experts, num_rows = len(counts), sum(counts)

        def random(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        # Numbers near a limit change sides where they are rounded, and their gradients with them: of the 25 million of
        # the large size some are within 1e-7 of any limit that is not far out, and of bfloat16's many.
        limit = {torch.float32: 0.5 if num_tokens < 100 else 5.0, torch.bfloat16: 7.0}[dtype]
        extra = []
        if biased:
            extra = [random(num_experts, 2, width), random(num_experts, hidden)]
        x = random(num_tokens, hidden)
        probs = torch.rand(num_rows, generator=generator)
        gate_up_proj = random(num_experts, 2, width, hidden) / hidden**0.5
        down_proj = random(num_experts, hidden, width) / width**0.5
        gather_idx = torch.randint(num_tokens, (num_rows,), generator=generator)
        offsets = group_ends(torch.tensor(counts))
        upstream = random(num_rows, hidden)

        results = []
        for backend, to in ((expert_backend(name), dict(device=device)), (loop_experts, dict(dtype=torch.float64))):
            leaves = [
                tensor.detach().to(**to, copy=True).requires_grad_()
                for tensor in (x, probs, gate_up_proj, down_proj, *extra)
            ]
            where = leaves[0].device
            more = dict(activation=ClampedSwiGLU(1.702, limit)) if biased else {}
            out = flat(backend)(leaves[0], gather_idx.to(where), offsets.to(where), *leaves[1:], **more)
            out.backward(upstream.to(**to))
            results.append([out, *(leaf.grad for leaf in leaves)])
        parts = ["out", "dx", "dprobs", "dw_gate_up", "dw_down", "db_gate_up", "db_down"]
        for part, got, expected in zip(parts[: len(results[0])], *results, strict=True):
            assert got.isfinite().all(), (name, part)
            if expected.norm() == 0:
                assert got.norm() == 0, (name, part)
            else:
                # One row's gradient of probs is one number, left over from a sum that cancels.
                allowed = TOLERANCE[dtype] * (3 if kind == "one row" else 1)
                assert relative(got, expected) < allowed, (name, part)
        for expert, count in enumerate(counts):
            if count == 0:  # not what lay in the memory before
                assert results[0][3][expert].norm() == 0 and results[0][4][expert].norm() == 0
