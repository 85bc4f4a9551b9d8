"""Text to train on."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 30 kB that no two rows of which are alike; an epoch is longer than any run here."""
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text("\n".join(f"{n} squared is {n * n}, and cubed {n**3}." for n in range(800)))
    return path
