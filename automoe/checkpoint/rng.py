"""The states of this rank's random generators as tensors of fixed size.

Training draws from counters (``automoe.counter_random``) and needs none of them. A recipe of one's own may use
torch's, Python's or NumPy's, and is to go on as if nothing had happened, too.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_WORDS = 624  # of a Mersenne twister's state


def rng_state() -> dict[str, torch.Tensor]:
    """``torch`` (uint8), ``python`` and ``numpy`` (int64 [627]) and, on CUDA, ``cuda`` (uint8): copies."""
    _, words, gauss = random.getstate()  # words: the state and the position in it
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937", kind
    state = {
        "torch": torch.get_rng_state(),
        "python": _twister(words, gauss is not None, gauss or 0.0),
        "numpy": _twister((*map(int, keys), int(position)), bool(has_gauss), float(cached)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Undo ``rng_state``; a generator that ``state`` lacks stays as it is."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        words, has_gauss, gauss = _from_twister(state["python"])
        random.setstate((3, tuple(words), gauss if has_gauss else None))
    if "numpy" in state:
        words, has_gauss, gauss = _from_twister(state["numpy"])
        keys = np.array(words[:_WORDS], dtype=np.uint32)
        np.random.set_state(("MT19937", keys, words[_WORDS], int(has_gauss), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _twister(words: tuple[int, ...], has_gauss: bool, gauss: float) -> torch.Tensor:
    bits = torch.tensor(gauss, dtype=torch.float64).view(torch.int64).item()
    return torch.tensor([*words, int(has_gauss), bits], dtype=torch.int64)


def _from_twister(state: torch.Tensor) -> tuple[list[int], bool, float]:
    numbers: list[Any] = state.tolist()
    gauss = torch.tensor(numbers[-1], dtype=torch.int64).view(torch.float64).item()
    return numbers[: _WORDS + 1], bool(numbers[-2]), gauss
