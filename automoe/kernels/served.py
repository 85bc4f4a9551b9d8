"""Check that the Triton kernels support a tensor; imports triton, so import it only when needed."""

from __future__ import annotations

import torch
import triton

from automoe.errors import BackendError

INTERPRETED = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_served(x: torch.Tensor, key: str, instead: str = "torch") -> None:
    """Raise ``BackendError`` unless ``x`` is on CUDA and is bfloat16, float16 or float32.

    Triton's interpreter (TRITON_INTERPRET=1) also takes tensors on the CPU.

    Args:
        key: the setting that selected a kernel by its value ``triton``, e.g. ``kernels.rope``.
        instead: the value of that setting which the error recommends.
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
