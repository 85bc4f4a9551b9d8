"""The part of the marked tests that a day runs."""

from __future__ import annotations

import pytest

from tests.support.sampling import DAYS, VARIABLE, sample_seed, todays

FILES = ["a.py"] * 7 + ["b.py"] + ["c.py"] * 40


def test_every_test_runs_once_in_as_many_days_whichever_comes_first() -> None:
    for first in (7, 8, 739_945):
        days = [todays(FILES, seed) for seed in range(first, first + DAYS)]
        assert all(sum(runs) == 1 for runs in zip(*days, strict=True))
        assert all(len(FILES) / DAYS - 3 < sum(day) < len(FILES) / DAYS + 3 for day in days)


def test_a_test_keeps_its_day_when_other_files_change() -> None:
    assert todays(FILES, 1)[:7] == todays(FILES[:7], 1)


def test_the_seed_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    assert sample_seed() == 7
    monkeypatch.delenv(VARIABLE)
    assert sample_seed() > 700_000  # a date's number
