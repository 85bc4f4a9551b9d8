"""Real training commands in processes of their own, with small recipes in place of the training loop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

ROOT = Path(__file__).parents[2]
RECIPES = Path(__file__).parent / "recipes"
TWO_RANKS = ("mesh=fsdp", "launch.num_ranks=2", "launch.device=cpu")
QUICK = ("data.max_bytes=100000", "observe.report=false")  # the launch is what is tested
PATIENCE_S = 120  # only a hang reaches it


class Command:
    """``python -m automoe.train`` with arguments, in a clean environment plus ``env``."""

    def __init__(self, run_dir: Path, env: dict[str, str] | None = None) -> None:
        self.run_dir = run_dir
        kept = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        path = os.pathsep.join([str(ROOT), str(RECIPES)])
        self.env = kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | (env or {})

    def arguments(self, recipe: str, *overrides: str) -> list[str]:
        return ["-m", "automoe.train", f"recipe={recipe}", f"run_dir={self.run_dir}", *QUICK, *overrides]

    def start(self, recipe: str, *overrides: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, *before, *self.arguments(recipe, *overrides)]
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, recipe: str, *overrides: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
        process = self.start(recipe, *overrides, before=before)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """Every living process that has this run directory on its command line."""
        import psutil  # not at the top: GPU tests are collected with these on machines that lack it

        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if (
                any(str(self.run_dir) in word for word in words)
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        return found

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.processes():
            assert time.monotonic() < deadline, f"left behind: {self.processes()}"
            time.sleep(0.1)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Rank 0's output up to the line with ``text``."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}: {seen}{process.stderr.read() if process.stderr else ''}")
