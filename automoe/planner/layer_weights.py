"""Weights of one layer on a rank: the matrices that multiply, and the bytes that FSDP gathers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from automoe.config.schema import Config
from automoe.model.adapters import packed_shape, with_adapters
from automoe.model.params import layer_params
from automoe.planner.step_memory import DTYPE_BYTES


@dataclass(frozen=True)
class Weight:
    """A weight matrix of [``rows``, ``columns``]; routed experts have ``groups`` of them."""

    part: str
    name: str
    rows: int
    columns: int
    groups: int
    tp_dim: int | None
    trained: bool
    # bytes per element of a packed weight, which is widened for each matmul; 0: not packed
    packed: float = 0.0
    detached: bool = False  # no gradient of its input


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, which depend on the mesh only through ``tp``."""

    weights: tuple[Weight, ...]
    dense_bytes: float  # bytes that FSDP gathers on a rank, after the tp shard
    expert_bytes: float  # bytes of all routed experts
    dense_trained: int
    expert_trained: int


_CACHE: dict[tuple[Any, ...], Any] = {}
T = TypeVar("T")


def cached(key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Return the result of ``make``, which is called once for ``key``."""
    if key not in _CACHE:
        if len(_CACHE) > 10_000:
            _CACHE.clear()
        _CACHE[key] = make()
    return _CACHE[key]


def layer_weights(key: str, config: Config, layer: int, tp: int) -> LayerWeights:
    """Return the weights of layer ``layer``, from a cache.

    Args:
        key: cache key that identifies the model and its trained parameters (``Place.key``).
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
            groups = param.shape[0] if param.expert else 1
            columns = param.shape[-1]
            rows = param.numel // groups // columns
            weights.append(
                Weight(
                    param.part,
                    param.name,
                    rows,
                    columns,
                    groups,
                    dim,
                    param.trained,
                    packed,
                    param.spec.detached,
                )
            )
    return LayerWeights(
        tuple(weights), gathered[False], gathered[True], trained[False], trained[True]
    )
