"""Hands a model the implementations that ``kernels`` names."""

from __future__ import annotations

from automoe.config.schema import KernelsConfig
from automoe.interop import quack, transformer_engine
from automoe.model.attention import attention_fn
from automoe.model.decoder import Decoder
from automoe.model.rope import rope_fns
from automoe.moe.experts import BACKENDS
from automoe.parallel.collectives import wait_tensor

BACKENDS |= {"te": transformer_engine.experts, "quack": quack.experts}  # of ``moe.experts``


def apply_kernels(model: Decoder, kernels: KernelsConfig) -> None:
    """Before everything that wraps what they compute: recomputation, compilation, FSDP.

    Raises:
        BackendError: an implementation whose package is missing.
    """
    te = kernels.attention == "te"
    model.attend = transformer_engine.attention() if te else attention_fn(kernels.attention)
    model.rope = rope_fns(kernels.rope)
    if kernels.norm == "te":
        transformer_engine.use_norms(model, wait_tensor)
