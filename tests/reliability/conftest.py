"""Where the uninterrupted runs of the session are."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")
