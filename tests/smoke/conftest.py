"""Says with which versions the smoke tests run."""

from __future__ import annotations

import sys
from importlib.metadata import distributions

PACKAGES = ("torch", "transformers", "datasets", "peft", "trl", "wandb", "triton", "numpy", "hydra-core", "safetensors")


def pytest_report_header() -> str:
    found = {one.name: one.version for one in distributions()}
    here = ", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)
    return f"Python {sys.version.split()[0]}, {here}"
