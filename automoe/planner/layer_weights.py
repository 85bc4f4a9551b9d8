"""Weights of one layer on a rank: the matrices that multiply, and the bytes that FSDP gathers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from automoe.config.schema import Config
from automoe.model.params import Param, layer_params
from automoe.model.trainable import is_trained, packed_shape, with_adapters
from automoe.planner.step_memory import DTYPE_BYTES


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer: its matrices, and sizes of all its weights, sharded by tp but not by ep and FSDP.

    Attributes:
        weights: (parameter, bytes per element in storage if ``lora.base`` packs it, else 0) of each
            matrix that tokens are multiplied by, unsharded.
        dense_bytes, expert_bytes: bytes that FSDP gathers of all weights but routed experts, and of
            all routed experts: packed, or in the compute dtype.
        dense_trained, expert_trained: trained elements of all weights but routed experts, and of all
            routed experts.
    """

    # Matrices that tokens are multiplied by, with the bytes per element of a packed one; 0: not packed.
    weights: tuple[tuple[Param, float], ...]
    dense_bytes: float  # bytes that FSDP gathers on a rank, after the tp shard
    expert_bytes: float  # bytes of all routed experts
    dense_trained: int
    expert_trained: int


_CACHE: dict[tuple[Any, ...], Any] = {}
T = TypeVar("T")


def cached(key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Return the result of ``make()``, from a cache of this process if it has one for ``key``.

    The cache is emptied when it holds more than 10,000 results.
    """
    if key not in _CACHE:
        if len(_CACHE) > 10_000:
            _CACHE.clear()
        _CACHE[key] = make()
    return _CACHE[key]


def layer_weights(key: str, config: Config, layer: int, tp: int) -> LayerWeights:
    """Return the matrices of layer ``layer`` and the sizes of all its weights.

    They are computed once per (key, layer, tp).

    Args:
        key: text that is equal for equal model, LoRA, trained parameters and dtype (``Place.key``).
        tp: size of the mesh axis tp. Byte and element counts are of one rank's shard, matrices whole.
    """
    return cached((key, layer, tp), lambda: _weights_of(config, layer, tp))


def _weights_of(config: Config, layer: int, tp: int) -> LayerWeights:
    weights = []
    gathered = {False: 0.0, True: 0.0}
    trained = {False: 0, True: 0}
    for param in with_adapters(layer_params(config.model, layer), config):
        dim = param.tp_dim(tp)
        numel = param.numel // (1 if dim is None else tp)
        shape = packed_shape(param, config)
        packed = prod(shape) / param.numel if shape else 0.0
        gathered[param.expert] += numel * (packed or DTYPE_BYTES[config.train.dtype][1])
        trained[param.expert] += param.trained * numel
        if param.multiplies and len(param.shape) > 1:
            weights.append((param, packed))
    return LayerWeights(
        tuple(weights), gathered[False], gathered[True], trained[False], trained[True]
    )


def ends_trained(config: Config) -> tuple[bool, bool]:
    """Return whether the embedding is trained, and whether the output head is."""
    names = "embed_tokens.weight", "lm_head.weight"
    embedding, head = (is_trained(name, config) for name in names)
    return embedding, embedding if config.model.tie_embeddings else head
