"""Which layers see what: every row as a whole, or a window of it. No torch."""

from __future__ import annotations

from automoe.config.schema import AttentionConfig


def window_of(attention: AttentionConfig, layer: int) -> int:
    """Keys that a query of layer ``layer`` sees at most, itself included; 0: all before it."""
    full = (layer + 1) % attention.full_attention_interval == 0
    return 0 if full else attention.sliding_window
