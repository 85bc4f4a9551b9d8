"""Pytest plugin that records the bits of the float64 mesh suite, to hold one commit against another.

    BITS=after.json pytest -p tests.support.mesh_bits -m "exhaustive or not exhaustive" tests/mesh/test_mesh_float64.py

The file has a hash of each field of each mesh's trajectory (losses, norms, counts, gradients, trained parameters), by
case. A copy of this file serves an older commit whose suite has the same ``run_case``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

hashes: dict[str, dict[str, str]] = {}


def add_bits(value: Any, digest: Any) -> None:
    """Add the bits of tensors, numbers and what holds them to ``digest``."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            digest.update(key.encode())
            add_bits(value[key], digest)
    elif isinstance(value, (list, tuple)):
        for item in value:
            add_bits(item, digest)
    else:
        digest.update(repr(value).encode())


def pytest_collection_finish(session: Any) -> None:
    """Let ``run_case`` of the suite record what it returns."""
    suite: Any = sys.modules["test_mesh_float64"]
    run_case = suite.run_case

    def recorded(ranks: Any, case: Any) -> Any:
        trajectory = run_case(ranks, case)
        entry = hashes[str(case)] = {}
        for field in fields(trajectory):
            digest = hashlib.sha256()
            add_bits(getattr(trajectory, field.name), digest)
            entry[field.name] = digest.hexdigest()[:16]
        Path(os.environ["BITS"]).write_text(json.dumps(hashes))
        return trajectory

    suite.run_case = recorded
