"""Real training commands with small recipes in place of the training loop."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

from tests.support.command import PATIENCE_S as PATIENCE_S
from tests.support.command import ROOT as ROOT
from tests.support.command import TORCHRUN as TORCHRUN
from tests.support.command import TrainCommand
from tests.support.command import read_until as read_until
from tests.support.forked import Forks

RECIPES = Path(__file__).parent / "recipes"
TWO_RANKS = ("mesh=fsdp", "launch.num_ranks=2", "launch.device=cpu")
QUICK = ("data.max_bytes=100000", "observe.report=false", "checkpoint=none")  # the launch is what is tested


class Command(TrainCommand):
    """``python -m automoe.train recipe=...``; the first argument of ``start`` and ``run`` is the recipe."""

    def __init__(self, run_dir: Path, env: dict[str, str] | None = None) -> None:
        super().__init__(run_dir, QUICK, env, [RECIPES])

    def start(self, recipe: str, *overrides: str, **options) -> subprocess.Popen[str]:
        return super().start(f"recipe={recipe}", *overrides, **options)

    def run_forked(self, forks: Forks, recipe: str, *overrides: str) -> tuple[int, str, str]:
        """As ``run``, without the seconds that imports take; for what neither signals nor counts processes."""
        _, module, *arguments = self.arguments(f"recipe={recipe}", *overrides)
        return forks.run(module, *arguments)

    def listens_at(self) -> set[str]:
        """Addresses at which the run's processes listen for TCP connections."""
        sockets = set()
        for pid in self.pids():
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    sockets.add(found[1])
        addresses = set()
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and rest[5] in sockets:
                    words = re.findall("........", local.partition(":")[0])  # each in the machine's byte order
                    packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
                    addresses.add(socket.inet_ntop(family, packed))
        return addresses
