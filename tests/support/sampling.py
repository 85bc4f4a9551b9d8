"""What of the cases runs when: ``@pytest.mark.one_in(n)`` and ``pytest --sample``.

``one_in(n)`` leaves every n-th case of a parametrised test to every change, the first among them, and marks the others
``exhaustive``. With ``--sample``, of the tests marked ``exhaustive`` and ``faults`` a part runs that changes with the
day. Each file's marked tests are dealt out over ``DAYS`` days in turn, so that whatever day one begins, all of them have
run ``DAYS`` days later. Tests without these marks always run. ``AUTOMOE_SAMPLE_SEED=N`` repeats a day's part; the
random meshes of the mesh suite are drawn from the same number.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from datetime import UTC, datetime

import pytest

DAYS = 14
VARIABLE = "AUTOMOE_SAMPLE_SEED"


def sample_seed() -> int:
    """``AUTOMOE_SAMPLE_SEED``, or the number of today (UTC)."""
    return int(os.environ.get(VARIABLE, datetime.now(UTC).date().toordinal()))


def todays(files: list[str], seed: int) -> list[bool]:
    """For marked tests in the order of collection, given by their files, whether each runs on the day ``seed``."""
    seen: Counter[str] = Counter()
    runs = []
    for file in files:  # files with one marked test each would otherwise all have the same day
        runs.append((zlib.crc32(file.encode()) + seen[file] + seed) % DAYS == 0)
        seen[file] += 1
    return runs


def mark_others_exhaustive(items: list[pytest.Item]) -> None:
    """Mark ``exhaustive`` all but every n-th case of each test that is marked ``one_in(n)``."""
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            seen[test] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help=f"1 of {DAYS} of the tests marked exhaustive or faults")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[VARIABLE] = str(sample_seed())  # the processes of pytest-xdist agree, at midnight too


def pytest_report_header(config: pytest.Config) -> str:
    part = f"1 of {DAYS} of the" if config.option.sample else "all"
    return f"{part} exhaustive and faults tests; {VARIABLE}={sample_seed()}"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_others_exhaustive(items)
    if not config.option.sample:
        return
    marked = [item for item in items if any(item.get_closest_marker(mark) for mark in ("exhaustive", "faults"))]
    runs = todays([item.nodeid.partition("::")[0] for item in marked], sample_seed())
    left_out = [item for item, runs_today in zip(marked, runs, strict=True) if not runs_today]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
