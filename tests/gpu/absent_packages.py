"""A pytest plugin (``-p absent_packages``): packages that a GPU machine may lack cannot be imported."""

from __future__ import annotations

import sys

ABSENT = ("hydra", "omegaconf", "psutil", "torchtitan", "wandb", "datasets")


def hide() -> None:
    """Make imports of ``ABSENT`` fail in this process, and ``importlib.util.find_spec`` find nothing."""
    for name in ABSENT:
        assert name not in sys.modules, f"{name} was imported before it could be hidden"
        sys.modules[name] = None  # type: ignore[assignment]


def pytest_configure() -> None:
    hide()
