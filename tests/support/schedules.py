"""Which pipeline schedules the installed torch runs."""

from __future__ import annotations

import torch

from automoe.config.pipeline import runs_halves
from automoe.launch.hardware import runs_halves_of_backward


def runs_here(schedule: str) -> bool:
    """Torch 2.11 has no halves of backward passes: a run with them is refused there (``tests/launch/test_hardware.py``)."""
    return runs_halves_of_backward(torch.__version__) or not runs_halves(schedule)
