"""The stored results of benchmarks: each says at which commit it was measured, and that commit is in the history."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
assert RESULTS


def cited(value: Any) -> Iterator[str]:
    """Every ``commit`` at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("commit"), str):
            yield value["commit"]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from cited(one)


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def history() -> set[str] | None:
    """Commits that lead to this checkout; None in a source archive, where nobody can know them."""
    return set(git("rev-list", "HEAD").split()) if (ROOT / ".git").exists() else None


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_cites_commits_of_this_history(path: Path, history: set[str] | None) -> None:
    """Clean ones: a ``+`` behind a hash means that what was measured is in no commit."""
    commits = list(cited(json.loads(path.read_text())))
    assert commits, "says no commit"
    assert all(re.fullmatch("[0-9a-f]{40}", one) for one in commits), commits
    if history is not None:
        missing = sorted(set(commits) - history)
        assert not missing, f"{missing} not in the history of HEAD (in a shallow clone: git fetch --unshallow)"
