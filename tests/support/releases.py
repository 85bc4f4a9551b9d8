"""What the oldest supported releases lack: a test that needs it is skipped there, and the skip says which release has it."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from automoe.config.pipeline import runs_halves
from automoe.launch.hardware import HALVES_SINCE_TORCH

HALVES = "backward passes in halves"
PACKED = "FSDP of frozen integers"
NO_DTENSORS = "a configuration of Mixtral that imports no DTensors"
# Package and first release. What torch lacks is refused before ranks start (tests/launch/test_hardware.py,
# tests/interop/test_torch_parts.py); a family that transformers lacks is written and not compared with it
# (tests/hf/test_hf_export.py).
SINCE = {
    HALVES: ("torch", HALVES_SINCE_TORCH),
    PACKED: ("torch", "2.13"),
    NO_DTENSORS: ("transformers", "5.21"),
    "the class of ernie4_5_moe": ("transformers", "5.23"),  # initialises its router
    "muse_spark_text": ("transformers", "5.20"),
    "inkling2_text": ("transformers", "5.23"),
    "inkling2_loop_text": ("transformers", "5.24"),
}


def lacks(what: str) -> str:
    """Which release has ``what``, if an older one is installed; "" if it is here."""
    package, release = SINCE.get(what, ("torch", "0"))
    if Version(version(package)) >= Version(release):
        return ""
    return f"{what}: since {package} {release}, and {version(package)} is installed"


def needs(what: str) -> pytest.MarkDecorator:
    """Mark of a test, or of one of its parameters."""
    return pytest.mark.skipif(bool(lacks(what)), reason=lacks(what) or "is here")


def skip_without(what: str) -> None:
    """Skip the test that runs: for what many tests make by one function."""
    if said := lacks(what):
        pytest.skip(said)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each case of the mesh suite whose schedule runs backward passes in halves."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for value in params.values():
        parallel = getattr(value, "parallel", None)
        if isinstance(parallel, dict) and runs_halves(parallel.get("schedule", "")):
            item.add_marker(needs(HALVES))
