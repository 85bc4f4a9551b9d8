"""Communicators and implementations that a model receives next to its configuration.

The mesh and the machine decide these before the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from automoe.comm.communicators import ProcessGroupCollection
from automoe.kernels.attention import AttentionFn, attend
from automoe.model.attention_masks import MaskFn, dense_masks
from automoe.model.loss import ChunkLoss, Loss, chunk_loss
from automoe.model.norm import RMSNorm
from automoe.model.rope import Rope
from automoe.moe.dispatch.base import Dispatcher
from automoe.moe.experts import MakeExpertBackend
from automoe.passes.calls import UNWRAPPED, LayerCalls, Wrap, as_it_is


@dataclass(frozen=True)
class BackendConfig:
    """Process groups and implementations of a model; the defaults are one rank and plain torch.

    Attributes:
        pg_collection: the groups of ranks that share sequences, weights and micro-batches.
        make_expert_backend: function that takes a layer's ``GroupedExperts`` and returns its expert
            backend, which multiplies by their weights; None: the backend that ``moe.experts`` names.
        dispatcher: brings tokens to the ranks of their experts; None: this rank has all experts.
        router_dtype: dtype in which routers and hyper-connections are stored; None: that of the other
            parameters.
        attention_kernel: function that computes softmax attention; delta nets and compressed attention
            have functions of their own.
        masks: function that makes the masks that ``attention_kernel`` takes.
        rope: functions that apply rotary embeddings.
        norm: constructor of a norm: (width, epsilon, whether it multiplies by 1 + weight) -> module.
        chunk_loss: function that computes the cross-entropy of a chunk of tokens.
        loss: reduction of per-token losses; None: mean cross-entropy.
        indexer_warmup: True if attention reads all keys, not those that indexers choose, and
            indexers learn from all of them.
        calls: function of a layer's number that returns the wrappers, such as recomputation, around
            the methods of that layer and of its modules.
        last_norm: wrapper of the call of the norm before the head: compilation, or none.
        always_masked: make a mask for all sequences that have document ids, also if each is one
            document (``attention_mask``).
        seed: seed of the random factors of routers' inputs (``moe.router_jitter``).
    """

    pg_collection: ProcessGroupCollection = field(default_factory=ProcessGroupCollection)
    make_expert_backend: MakeExpertBackend | None = None
    dispatcher: Dispatcher | None = None
    router_dtype: torch.dtype | None = None
    attention_kernel: AttentionFn = attend
    masks: MaskFn = dense_masks
    rope: Rope = field(default_factory=Rope)
    norm: Callable[..., RMSNorm] = RMSNorm
    chunk_loss: ChunkLoss = chunk_loss
    loss: Loss | None = None
    indexer_warmup: bool = False
    calls: Callable[[int], LayerCalls] = lambda layer: UNWRAPPED
    last_norm: Wrap = as_it_is
    always_masked: bool = False
    seed: int = 0
