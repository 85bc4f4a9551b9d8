"""Norms, and sums of weight gradients, on one GPU: microseconds beside torch's own kernels and beside the bytes' floor.

    python benchmarks/gpu_parts.py       # on a GPU, half a minute: writes benchmarks/results/gpu_parts.json

``norms``: our kernels, torch's fused ones after a cast to float32, as they were called before, and torch's in bfloat16
with a bfloat16 weight, which rounds more. ``gradients``: a product of a weight's gradient and its addition to a float32
sum, in two operations or in one (``parallel.expert_wgrad=fused``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import measuring  # noqa: F401  (puts the checkout on the path)
import torch
import torch.nn.functional as F
from measuring import PEAK, commit, result_file
from triton.testing import do_bench

from automoe.kernels.norm import norm_grads, norm_rows
from automoe.moe.gradient_sums import add_product
from automoe.observe.environment import describe_environment

BYTES_PER_SECOND = 3.0e12  # a device-to-device copy on an H100, bytes read and written
# rows and width: hidden states of Qwen3-30B-A3B, Mixtral and DeepSeek-V3, heads, latents
NORMS = [(16_384, 2048), (65_536, 4096), (16_384, 7168), (524_288, 128), (65_536, 128), (16_384, 1536), (16_384, 512)]
# experts, rows of each, output and input features; one expert stands for a dense matrix
GRADIENTS = [
    (128, 1024, 1536, 2048),
    (32, 4096, 1536, 2048),
    (16, 2048, 4096, 7168),
    (8, 4096, 14_336, 6144),
    (1, 16_384, 7168, 2048),
    (1, 16_384, 24_576, 1536),
    (1, 16_384, 36_864, 7168),
]


def microseconds(fn: Callable[[], object]) -> float:
    return round(1e3 * do_bench(fn, warmup=15, rep=40, return_mode="median"), 1)


def norm(rows: int, width: int) -> dict[str, float]:
    x, grad = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(width, device="cuda")
    narrow = weight.bfloat16()
    fused, fused_back = torch.ops.aten._fused_rms_norm, torch.ops.aten._fused_rms_norm_backward
    both = [True, True]
    _, scales = norm_rows(x, weight, 1e-6)
    _, narrow_scales = fused(x, weight.shape, narrow, 1e-6)
    return {
        "rows": rows,
        "width": width,
        "forward": microseconds(lambda: norm_rows(x, weight, 1e-6)),
        "backward": microseconds(lambda: norm_grads(grad, x, scales, weight)),
        "forward_floor": round(1e6 * 4 * rows * width / BYTES_PER_SECOND, 1),
        "backward_floor": round(1e6 * 6 * rows * width / BYTES_PER_SECOND, 1),
        "forward_before": microseconds(lambda: fused(x.float(), weight.shape, weight, 1e-6)[0].bfloat16()),
        "backward_before": microseconds(
            lambda: fused_back(grad.float(), x.float(), weight.shape, scales, weight, both)[0].bfloat16()
        ),
        "forward_bfloat16": microseconds(lambda: fused(x, weight.shape, narrow, 1e-6)),
        "backward_bfloat16": microseconds(lambda: fused_back(grad, x, weight.shape, narrow_scales, narrow, both)),
    }


def gradient(experts: int, rows: int, out: int, into: int) -> dict[str, float]:
    grad = torch.randn(experts * rows, out, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(experts * rows, into, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros(experts, out, into, device="cuda")
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * rows
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def product() -> torch.Tensor:
        return grad.T @ x if experts == 1 else grouped(grad.T, x, offs=ends)

    def fused() -> None:
        for index in range(experts):
            mine = slice(index * rows, (index + 1) * rows)
            add_product(total[index], grad[mine], x[mine])

    return {
        "experts": experts,
        "rows": rows,
        "out": out,
        "in": into,
        "product": microseconds(product),
        "product_then_sum": microseconds(lambda: total.add_(product())),
        "fused": microseconds(fused),
        "product_floor": round(1e6 * 2 * experts * rows * out * into / PEAK, 1),
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = {"commit": commit(), "environment": describe_environment(), "norms": [], "gradients": []}
    for name, measure, cases in (("norms", norm, NORMS), ("gradients", gradient, GRADIENTS)):
        for case in cases:
            report[name].append(measure(*case))
            print(report[name][-1], flush=True)
    result_file(args.out, "gpu_parts", False).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
