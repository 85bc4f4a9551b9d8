"""All uses of transformer-engine: backends of attention, norm and experts.

They are ``kernels.attention=te``, ``kernels.norm=te`` and ``moe.experts=te``. The calls follow the
signatures of 2.20.2 as published in its sources; this project has not run them on a GPU. Parameters
stay the model's own, under their own names: a module of transformer-engine is made without storage
and called with the model's parameters in place of its own. So checkpoints do not change and get no
extra state of transformer-engine. If transformer-engine cannot be imported, each function raises
``BackendError`` and names the available alternative.

Shapes: B rows, S positions, N heads, G key heads, R computed rows, E experts of this rank, H
hidden, I width.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from automoe.comm.collectives import wait_tensor
from automoe.errors import BackendError, import_backend
from automoe.kernels.activation import SWIGLU, Activation
from automoe.kernels.attention import AttentionFn
from automoe.kernels.row_sums import gather_rows
from automoe.model.norm import RMSNorm
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.experts import ExpertBackend
from automoe.moe.grouped_mm import grouped_mm_experts


def attention() -> AttentionFn:
    """Return a function (q, k, v, mask, scale, sinks=None): causal attention by transformer-engine.

    It takes q [B, S, N, D], k [B, S, G, D] and v [B, S, G, Dv], returns [B, S, N, Dv], and raises
    ``BackendError`` for a mask or sinks. For this process, transformer-engine's unfused attention
    is switched off by ``NVTE_UNFUSED_ATTN=0``.
    """
    te = _load("kernels.attention=te", "kernels.attention=sdpa")
    # Without this, its unfused attention, which keeps every score, would replace a missing kernel.
    os.environ["NVTE_UNFUSED_ATTN"] = "0"

    @cache
    def module(heads: int, groups: int, query_dim: int, value_dim: int, scale: float) -> nn.Module:
        return te.DotProductAttention(
            heads,
            (query_dim, value_dim),
            num_gqa_groups=groups,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal",
            softmax_scale=scale,
        )

    def attend(q, k, v, mask, scale: float, sinks=None) -> torch.Tensor:
        """Return causal attention of q [B, S, N, D], k [B, S, G, D] and v [B, S, G, Dv].

        The result is [B, S, N, Dv]. ``scale`` is the factor of the products of queries and keys.

        Raises:
            BackendError: ``mask`` or ``sinks`` is given.
        """
        if mask is not None or sinks is not None:
            raise BackendError(
                "kernels.attention=te attends to all of the row before a query, and this layer has "
                f"{'a mask' if sinks is None else 'sinks'}. Set kernels.attention=sdpa"
            )
        out = module(q.shape[2], k.shape[2], q.shape[3], v.shape[3], scale)(q, k, v)
        return out.view(*q.shape[:3], v.shape[3])  # the module returns [B, S, N Dv]

    return attend


def experts() -> ExpertBackend:
    """Return the expert backend that multiplies by transformer-engine's ``GroupedLinear``.

    It is a function (x [T, H], token of each row [R], end of each expert's rows [E], routing weight
    of each row [R], ``ExpertWeights``, activation function) that returns routing weight * expert(x) [R, H]. Each call
    has one host sync, for the number of rows of every expert. Gradients of one token's rows are
    added up in a fixed order. For biases the backend raises ``BackendError``.
    """
    te = _load("moe.experts=te", "moe.experts=grouped_mm")

    @cache
    def module(num_experts: int, size_in: int, size_out: int, dtype: torch.dtype) -> nn.Module:
        return te.GroupedLinear(
            num_experts, size_in, size_out, bias=False, params_dtype=dtype, device="meta"
        )

    def multiply(rows: torch.Tensor, splits: list[int], weights: torch.Tensor) -> torch.Tensor:
        """Return [R, N]: rows [R, K], sorted by expert, times the experts' weights [E, N, K].

        Args:
            splits: number of rows of each expert.
        """
        num_experts, size_out, size_in = weights.shape
        ours = {f"weight{i}": weight for i, weight in enumerate(weights.unbind(0))}
        return functional_call(
            module(num_experts, size_in, size_out, weights.dtype), ours, (rows, splits)
        )

    def te_experts(
        x_TH,
        gather_idx_R,
        offsets_E,
        probs_R,
        weights: ExpertWeights,
        activation: Activation = SWIGLU,
    ) -> torch.Tensor:
        if weights.gate_up_proj_bias is not None:
            raise BackendError(
                "moe.experts=te has only experts without biases. Set moe.experts=grouped_mm"
            )
        ends = offsets_E.tolist()
        splits = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        num_rows = gather_idx_R.shape[0]
        used = ends[-1]
        if used == 0:  # nothing to multiply; every weight still gets its gradient of zeros
            out = grouped_mm_experts(x_TH, gather_idx_R[:0], offsets_E, probs_R[:0], weights)
        else:
            rows = gather_rows(x_TH, gather_idx_R[:used])
            gate, up = multiply(rows, splits, weights.joined().gate_up_proj).chunk(2, dim=-1)
            act = activation(gate, up) * probs_R[:used, None].to(x_TH.dtype)
            out = multiply(act, splits, weights.down_proj)
        # rows past the last offset belong to no expert
        return F.pad(out, (0, 0, 0, num_rows - used))

    return te_experts


def norm() -> Callable[..., RMSNorm]:
    """Return a constructor (dim, eps, zero_centered=False) of RMS norms by transformer-engine.

    With ``zero_centered`` the normalized numbers are multiplied by 1 + weight.
    """
    return partial(_Norm, _load("kernels.norm=te", "kernels.norm=torch"))


def _load(choice: str, instead: str) -> Any:
    return import_backend(
        "transformer_engine.pytorch",
        choice,
        f"Install transformer-engine with its torch part for this CUDA, or set {instead}",
    )


class _Norm(RMSNorm):
    """RMS norm over the last dim of x by transformer-engine; the result has x's shape and dtype."""

    def __init__(self, te: Any, dim: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__(dim, eps, zero_centered)
        module = te.RMSNorm(
            dim, eps=eps, zero_centered_gamma=zero_centered, device="meta", dtype=self.weight.dtype
        )
        # in a tuple, so that it is no submodule and its parameters get no names
        self._module = (module,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The module reads x in the dtype of the weight, computes in float32 and returns the dtype of
        # the weight. Under tp the first layer's rows may still be in flight, and a kernel that reads
        # by pointer must wait.
        return functional_call(self._module[0], {"weight": self.weight}, (wait_tensor(x),)).to(
            x.dtype
        )
