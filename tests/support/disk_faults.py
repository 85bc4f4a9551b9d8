"""Disks that are full or fail, for whole commands: a library that is loaded before all others (``disk_faults.cpp``).

It notes every file that a command or one of its ranks makes or opens for writing, and lets one of them fail:

    disk = Disk(folder)
    with forks(folder, env | disk.env) as started:
        started.run("automoe.train", ..., env=disk.recording)
        for file in disk.recorded():
            started.run("automoe.train", ..., env=disk.fault(file, errno.ENOSPC, "write"))
"""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".cpp")


class Written(NamedTuple):
    """A file or folder that was written: the part of its path that is the same in another run, and its name."""

    part: str
    name: str
    is_folder: bool


class Disk:
    """What is below ``folder``, watched by the processes whose environment has ``env``."""

    def __init__(self, folder: Path) -> None:
        library = folder / "disk_faults.so"
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "DISK_FAULT_ROOT": f"{folder}/"}
        self.log = folder / "written"
        self.recording = {"DISK_FAULT_LOG": str(self.log)}

    def recorded(self) -> list[Written]:
        """What was written while ``recording``, in order."""
        return list(dict.fromkeys(map(_written, self.log.read_text().splitlines())))

    def fault(
        self, part: str, number: int, call: str, once: Path | None = None, since: Path | None = None
    ) -> dict[str, str]:
        """The environment in which ``call`` (write, open, mkdir) fails on paths that have ``part`` in them.

        Args:
            once: made when it happens, and then it does not happen again.
            since: nothing fails before this path is there.
        """
        env = {"DISK_FAULT": f"{number}:{call}:{part}"}
        paths = {"DISK_FAULT_ONCE": once, "DISK_FAULT_SINCE": since}
        return env | {name: str(path) for name, path in paths.items() if path is not None}


def _written(line: str) -> Written:
    path = Path(line)
    part, name = f"/{path.parent.name}/{path.name}", path.name
    if path.parent.name == "straight":  # the run's own folder, and the cache beside it
        part = f"/{name}"
    elif scratch := re.fullmatch(rf"\.(.+)\.{re.escape(socket.gethostname())}\.\d+", name):
        part, name = f"/.{scratch[1]}.", scratch[1]
    elif name.startswith(".tmp-probe-"):
        part, name = "/.tmp-probe-", "checkpoints"
    elif drawn := re.fullmatch(r"(.+\.)[a-z0-9_]{8}", name):  # of tempfile
        part, name = f"/{drawn[1]}", path.parent.name
    elif re.fullmatch(r".+\.[a-z0-9_]{8}", path.parent.name):
        part = f"/{name}"
    return Written(part, name.removeprefix(".").removesuffix(".tmp"), line.endswith("/"))
