"""How ranks of one machine meet without a door for others.

A ``TCPStore`` listens on all interfaces and asks nobody who he is; values of it, and what arrives over gloo, are
unpickled. So the store is a file that has no name, which only processes of the same user can open, and which is gone with
the process that made it however that ends; and gloo and NCCL listen on loopback alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}  # of every rank's environment


@contextmanager
def store_file() -> Iterator[Path]:
    """Path of an empty file in the memory of this process, for the ``FileStore`` of its children (Linux)."""
    with open(os.memfd_create("automoe-store"), "rb") as file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
