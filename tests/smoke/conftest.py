"""Says with which versions the smoke tests run."""

from __future__ import annotations

import sys
from importlib.metadata import version

PACKAGES = ("torch", "transformers", "datasets", "triton", "numpy", "hydra-core", "safetensors")


def pytest_report_header() -> str:
    return f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version(name)}" for name in PACKAGES)
