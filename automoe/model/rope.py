"""Which dims of a head rotate, and by which functions (``automoe.kernels.rotation``).

Letters: B rows, S positions, N heads, D width of a head, R rotated width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from automoe.config.schema import AttentionConfig, RopeConfig
from automoe.errors import import_backend
from automoe.kernels.rotation import join_keys, rotate


def rotary_dim(attention: AttentionConfig, rope: RopeConfig) -> int:
    """Return how many dims of a head rotate.

    Grouped-query attention: the share ``partial_rotary_factor`` of all dims; other kinds:
    ``qk_rope_head_dim``.
    """
    if attention.kind == "gqa":
        return int(attention.head_dim * rope.partial_rotary_factor)
    return attention.qk_rope_head_dim


@dataclass(frozen=True)
class Rope:
    """Functions that apply rotary embeddings, by default in plain torch.

    Attributes:
        rotate: (x [B, S, N, D], cos, sin, interleaved, start, back) -> x with its rotary dims, from
            start on, rotated; interleaved: pairs of x are dims (2i, 2i+1); back: rotated back.
        join_keys: for MLA: (kv [B, S, N, D], k_rope [B, S, R], nope_dim) -> (keys [B, S, N,
            nope_dim + R], values [B, S, N, D - nope_dim]).
        angle_dtype: dtype of cos and sin; None: the model's dtype.
    """

    rotate: Callable[..., Tensor] = rotate
    join_keys: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = join_keys
    angle_dtype: torch.dtype | None = None


def rope_fns(kernel: str) -> Rope:
    """Return the functions that apply rotary embeddings by ``kernel``: torch or triton.

    Raises:
        BackendError: ``kernels.rope=triton``, and triton is not installed.
    """
    if kernel == "torch":
        return Rope()
    assert kernel == "triton"
    import_backend("triton", "kernels.rope=triton", "Install it, or set kernels.rope=torch")
    from automoe.kernels import rope as rope_kernels

    return Rope(partial(rotate, turn=rope_kernels.turn_dims), rope_kernels.join_keys, torch.float32)
