"""Real training commands with small recipes in place of the training loop."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.command import PATIENCE_S as PATIENCE_S
from tests.support.command import ROOT as ROOT
from tests.support.command import TrainCommand
from tests.support.command import read_until as read_until

RECIPES = Path(__file__).parent / "recipes"
TWO_RANKS = ("mesh=fsdp", "launch.num_ranks=2", "launch.device=cpu")
QUICK = ("data.max_bytes=100000", "observe.report=false")  # the launch is what is tested


class Command(TrainCommand):
    """``python -m automoe.train recipe=...``; the first argument of ``start`` and ``run`` is the recipe."""

    def __init__(self, run_dir: Path, env: dict[str, str] | None = None) -> None:
        super().__init__(run_dir, QUICK, env, [RECIPES])

    def start(self, recipe: str, *overrides: str, **options) -> subprocess.Popen[str]:
        return super().start(f"recipe={recipe}", *overrides, **options)
