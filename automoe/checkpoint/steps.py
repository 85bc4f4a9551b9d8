"""Names of the steps in a checkpoint folder. This module does not import torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = "checkpoints"


def step_number(name: str) -> int:
    """Return N of ``step-N``."""
    return int(name.removeprefix("step-"))


def committed_steps(folder: Path) -> list[str]:
    """Return the names of the committed steps, oldest first; a link to a step counts as a step.

    Raises:
        OSError: the folder cannot be read, which does not mean that it is empty.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((name for name in names if re.fullmatch(r"step-\d+", name)), key=step_number)
