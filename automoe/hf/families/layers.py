"""Conversion of per-layer lists in ``config.json``, for equally spaced layers of one kind."""

from __future__ import annotations

from typing import Any

from automoe.config.schema import AttentionConfig, ModelConfig, has_rotation, window_of
from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import Field

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _kinds(attention: AttentionConfig, count: int) -> list[str]:
    return [_SLIDING if window_of(attention, layer) else _FULL for layer in range(count)]


def _attention(kinds: list[str], hf: Any) -> AttentionConfig:
    """Return a configuration with the interval N and the offset of full-attention layers in ``kinds``.

    Layer i (from 0) is one of them if (i + 1 - offset) % N == 0. Raises ``ConfigError`` unless
    their distances are equal and all other layers have a window.
    """
    full, count = [layer for layer, kind in enumerate(kinds) if kind == _FULL], hf.num_hidden_layers
    first, second = [*full, 2 * count, 3 * count][:2]
    interval = second - first if len(full) > 1 else max(first + 1, count - first)
    attention = AttentionConfig(
        full_attention_interval=interval,
        full_attention_offset=(first + 1) % interval,
        sliding_window=1,
    )
    if kinds != _kinds(attention, count):
        here = "here layers with full_attention are at equal distances, and others have a window"
        raise not_computed(hf.name_or_path, f"layer_types={kinds}, and {here}")
    return attention


def window_layers(key: str) -> Field:
    """Return the ``Field`` (a key of config.json) that reads ``layer_types``, each layer's kind, into ``key``.

    ``key`` is ``full_attention_interval`` or ``full_attention_offset`` of ``AttentionConfig``. An
    export writes ``layer_types`` anew from the configuration.
    """
    return Field(
        "layer_types",
        read=lambda kinds, hf: getattr(_attention(kinds, hf), key),
        write=lambda _, config: _kinds(config.attention, config.num_layers),
    )


def _read_nope(thetas: list[float], hf: Any) -> bool:
    theta = hf.rope_parameters["rope_theta"]
    if thetas != [theta * (kind != _FULL or 0 not in thetas) for kind in hf.layer_types]:
        here = f"here it is rope_theta={theta}, or 0 in all layers with full_attention and no other"
        raise not_computed(hf.name_or_path, f"layer_rope_theta={thetas}, and {here}")
    return 0 in thetas


def _write_thetas(_: bool, config: ModelConfig) -> list[float]:
    layers = range(config.num_layers)
    return [config.rope.theta * has_rotation(config.attention, layer) for layer in layers]


NOPE_FULL = Field("layer_rope_theta", read=_read_nope, write=_write_thetas)
