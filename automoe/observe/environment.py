"""What a run ran on: recorded when it starts, so that a report made elsewhere still tells the truth."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from automoe import __version__

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("torch", "transformers", "safetensors", "torchtitan", "triton", "numpy", "hydra-core", "wandb")


def describe_environment() -> dict[str, str]:
    """Versions and hardware as text. Imports no package it names; the GPU is asked only if torch is loaded."""
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


def write_environment(run_dir: Path) -> None:
    (run_dir / ENVIRONMENT_FILE).write_text(json.dumps(describe_environment(), indent=1) + "\n")
