"""The list of mutants keeps up with the code: each still changes one place, and the tests that it names are there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def problem(mutant: Mutant, source: str) -> str | None:
    if (found := source.count(mutant.old)) != 1:
        return f"{mutant.old!r} is there {found} times"
    if mutant.old == mutant.new:
        return f"{mutant.old!r} is left as it is"
    if not mutant.tests:
        return f"{mutant.old!r}: no test is named"
    if absent := [test for test in mutant.tests if not (ROOT / test.split("::")[0]).is_file()]:
        return f"{mutant.old!r}: there is no {absent[0]}"
    return None


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_mutant_changes_one_place(file: str) -> None:
    source = (ROOT / file).read_text()
    problems = [found for m in MUTANTS if m.file == file and (found := problem(m, source)) is not None]
    assert not problems, "tests/mutation/mutants.tsv: " + "; ".join(problems)


def test_there_are_enough_and_none_twice() -> None:
    assert len(MUTANTS) >= 100
    twice = [key for key, n in Counter((m.file, m.old, m.new) for m in MUTANTS).items() if n > 1]
    assert not twice
    assert sum(bool(mutant.lives_because) for mutant in MUTANTS) <= 0.05 * len(MUTANTS)
