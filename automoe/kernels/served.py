"""Check that the Triton kernels support a tensor; needs triton, so import it only on demand."""

from __future__ import annotations

import torch
import triton

from automoe.errors import BackendError

INTERPRETED = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_served(x: torch.Tensor, key: str, instead: str = "torch") -> None:
    """Raise ``BackendError`` if a Triton kernel does not take ``x``: on the CPU, or of its dtype.

    Args:
        key: the setting whose value ``triton`` selected a kernel, e.g. ``kernels.rope``.
        instead: the value that works on the CPU and for other dtypes.
    """
    if x.dtype not in _DTYPES:
        raise BackendError(
            f"{key}=triton computes in bfloat16, float16 and float32, and the model in {x.dtype}. {key}={instead} takes "
            "any dtype"
        )
    if x.device.type != "cuda" and not INTERPRETED:
        raise BackendError(
            f"{key}=triton needs a CUDA device, and the model is on {x.device}. Choose {key}={instead}, or set "
            "TRITON_INTERPRET=1 to try the kernels out, very slowly"
        )
