"""Which layers see what: every row as a whole, a window of it, or a state that runs through it. No torch."""

from __future__ import annotations

from automoe.config.schema import AttentionConfig


def window_of(attention: AttentionConfig, layer: int) -> int:
    """Keys that a query of layer ``layer`` sees at most, itself included; 0: all before it."""
    return 0 if _full(attention, layer) else attention.sliding_window


def is_linear(attention: AttentionConfig, layer: int) -> bool:
    """Whether layer ``layer`` is a gated delta net."""
    return attention.linear_num_key_heads > 0 and not _full(attention, layer)


def _full(attention: AttentionConfig, layer: int) -> bool:
    return (layer + 1) % attention.full_attention_interval == 0
