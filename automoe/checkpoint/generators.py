"""States of random generators in a checkpoint.

Training draws from counters (``automoe.kernels.counter_random``) and uses no generator. A user's
recipe may use the generators of torch, Python or NumPy, and must resume with the same numbers.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist

Tensors = dict[str, torch.Tensor]  # by name


def rng_state() -> Tensors:
    """Return copies of the states of this process's random generators.

    Returns:
        ``torch`` (uint8), ``python`` and ``numpy`` (int64 [627]) and, on CUDA, ``cuda`` (uint8).
    """
    _, words, gauss = random.getstate()  # words: the state and the position in it
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937", kind
    numpy_words = (*map(int, keys), int(position))
    state = {
        "torch": torch.get_rng_state(),
        "python": _twister(words, gauss),
        "numpy": _twister(numpy_words, float(cached) if has_gauss else None),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Tensors) -> None:
    """Restore the result of ``rng_state``; a generator that ``state`` lacks stays as it is."""
    state = rng_state() | state
    torch.set_rng_state(state["torch"])
    words, gauss = _from_twister(state["python"])
    random.setstate((3, tuple(words), gauss))
    (*keys, position), gauss = _from_twister(state["numpy"])
    np.random.set_state(("MT19937", keys, position, int(gauss is not None), gauss or 0.0))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _twister(words: tuple[int, ...], gauss: float | None) -> torch.Tensor:
    bits = torch.tensor(gauss or 0.0, dtype=torch.float64).view(torch.int64).item()
    return torch.tensor([*words, int(gauss is not None), bits], dtype=torch.int64)


def _from_twister(state: torch.Tensor) -> tuple[list[int], float | None]:
    *words, has_gauss, _ = state.tolist()
    return words, state[-1:].view(torch.float64).item() if has_gauss else None


def of_this_rank(generators: Tensors) -> Tensors:
    """Rename the tensors of ``rng_state`` (``torch``, ...) for this rank: ``generators.3.torch`` on rank 3."""
    return {f"generators.{dist.get_rank()}.{name}": state for name, state in generators.items()}
