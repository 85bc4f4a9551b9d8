"""Versions of packages and hardware of this process, for a run's record. Does not import torch."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

from automoe import __version__

PACKAGES = ("torch", "transformers", "safetensors", "triton", "numpy", "hydra-core", "wandb")


def describe_environment() -> dict[str, str]:
    """Return name -> version or hardware of this machine, for a run's ``environment.json``.

    Packages are not imported. The GPU's name is included only if torch is already loaded.
    """
    environment = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} usable",
        "python": platform.python_version(),
        "automoe": __version__,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        environment["gpu"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    for package in PACKAGES:
        try:
            environment[package] = version(package)
        except PackageNotFoundError:
            environment[package] = "not installed"
    return environment
