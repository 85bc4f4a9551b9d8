"""The steps in a checkpoint folder, in their order. This module does not import torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from automoe.storage.files import read_file
from automoe.storage.foreign import parse_json

FOLDER = "checkpoints"
MANIFEST = "manifest.json"


def step_number(name: str) -> int:
    """Return the number N in a folder name ``step-N``."""
    return int(name.removeprefix("step-"))


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of a manifest, computed without its own entry ``sha256``."""
    content = {key: manifest[key] for key in manifest if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def true_number(step_dir: Path) -> int:
    """Return the step that a folder holds: the number in its manifest, however it is named.

    If the manifest is damaged or cannot be read, the number in the folder's name is returned.
    """
    named = step_number(step_dir.name)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        manifest = parse_json(read_file(step_dir / MANIFEST))
        if manifest["sha256"] == digest_of(manifest):
            return int(manifest["step"])
    return named


def is_misnamed(step_dir: Path) -> bool:
    """Return True if a step folder's name has another step than its manifest."""
    return true_number(step_dir) != step_number(step_dir.name)


def misnamed(folder: Path, names: list[str]) -> list[str]:
    """Return a warning for each step folder in ``names`` whose manifest states another step."""
    return [
        f"{folder / name} is step {true_number(folder / name)}, as its {MANIFEST} says, "
        "and counts as that step. Give copies names other than step-N"
        for name in names
        if is_misnamed(folder / name)
    ]


def committed_steps(folder: Path) -> list[str]:
    """Return the names of the committed step folders, oldest first by their manifests' numbers.

    The list is empty if ``folder`` does not exist. A link to a step counts as a step. Copies of a
    step under other names come before it.

    Raises:
        OSError: the folder cannot be read, which does not mean that it is empty.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    true = {name: true_number(folder / name) for name in names if re.fullmatch(r"step-\d+", name)}
    return sorted(true, key=lambda name: (true[name], step_number(name) == true[name]))
