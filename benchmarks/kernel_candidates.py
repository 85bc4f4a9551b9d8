"""Blocks that ``tune_kernels.py`` times beside the choices of ``automoe.kernels.tiling``."""

from __future__ import annotations

from dataclasses import replace

from automoe.kernels.tiling import HOPPER, Blocks


def candidates(product: str) -> list[Blocks]:
    """Return blocks to try against ``HOPPER``'s choice, which comes first."""
    chosen = HOPPER[product]
    narrow = replace(chosen, columns=chosen.columns // 2)
    tilings = [chosen, narrow]
    if not product.startswith("grad_weights"):
        tilings += [replace(chosen, tma=not chosen.tma)]
    if product == "back":
        tilings += [replace(narrow, columns_at_once=64)]
    if product == "grad_weights_gathered":
        tilings += [replace(chosen, num_stages=7), replace(narrow, num_stages=10)]
    else:
        # Three stages of half the columns leave room for a second program, which computes while the
        # first one stores (not for "back", which takes too many registers).
        tilings += [replace(chosen, num_stages=3), replace(narrow, num_stages=3), replace(narrow, num_warps=4)]
    return tilings + [replace(chosen, summed=128, num_stages=2)]
