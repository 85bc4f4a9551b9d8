"""``kernels.rope=triton`` with DeepSeek-V3's head dims on the device, against torch's operations in float64."""

from __future__ import annotations

import pytest
import torch
from device_models import relative

from automoe.kernels import rotation
from automoe.model.rope import rope_fns

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}  # one rounding of the result
NOPE, TURN, VALUES = 128, 64, 128
SIZES = {"cpu": (1, 3, 17), "cuda": (2, 2048, 128)}  # rows, positions, heads


def results(function, args: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """What ``function`` returns, and the gradients of the ``args`` that are trained, from one of ``dtype``."""
    out = function(*args)
    out = [out] if isinstance(out, torch.Tensor) else list(out)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator).to(dtype).to(o) for o in out]
    return out + list(torch.autograd.grad(out, [arg for arg in args if arg.requires_grad], upstream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_and_keys_of_mla(device: torch.device, dtype: torch.dtype) -> None:
    rows, positions, heads = SIZES[device.type]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    q, kv = normal(rows, positions, heads, NOPE + TURN), normal(rows, positions, heads, NOPE + VALUES)
    k_rope = normal(rows, positions, TURN)
    angles = torch.rand(rows, positions, 1, TURN // 2, generator=generator).mul(6).to(device)
    kernels = rope_fns("triton")
    for fused, reference, args in (
        (kernels.rotate, rotation.rotate, [q, angles.cos(), angles.sin(), True, NOPE]),
        (kernels.join_keys, rotation.join_keys, [kv, k_rope, NOPE]),
    ):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        others = args[len(tensors) :]
        wide = [arg.detach().double().requires_grad_(arg.requires_grad) for arg in tensors]
        got = results(lambda *tensors: fused(*tensors, *others), tensors, dtype)  # noqa: B023
        expected = results(lambda *tensors: reference(*tensors, *others), wide, dtype)  # noqa: B023
        assert all(relative(a, b) <= TOLERANCE[dtype] for a, b in zip(got, expected, strict=True))
        again = results(lambda *tensors: fused(*tensors, *others), tensors, dtype)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
