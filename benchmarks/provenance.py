"""What a result was measured with: the commit and the processor."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commit(*paths: str) -> str:
    """Hash of the checkout, with ``+`` where tracked or new files differ from it.

    Args:
        paths: what counts, relative to this folder; none: every tracked file.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", *(("--", *paths) if paths else ("-uno",)))
    return git("rev-parse", "HEAD") + ("+" if changed else "")


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
