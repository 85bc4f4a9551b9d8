"""Mistakes of one line, each with the tests that should notice it: the rows of ``mutants.tsv``.

A fragment of a line is enough, as long as the file has it once (``test_mutants_apply`` sees to that); \\n stands for a
line's end. Tests are the fastest that should see the mistake, not all that would; ``loop:CASE`` stands for a run against
the plain loop over transformers. A mutant that no test can see says in the last column why it may live. ``run.py`` puts
them in, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LOOP = (
    "every_recorded_number_is_the_plain_loops",
    "tokens_of_every_expert_are_counted_without_padding",
    "validation_is_a_mean_over_tokens",
    "every_weight_of_the_exported_checkpoint_is_the_plain_loops",
)


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in ``file``, and one of ``tests`` fails, unless ``lives_because`` says why none can."""

    file: str
    old: str
    new: str
    tests: list[str]
    lives_because: str = ""


def read(row: str) -> Mutant:
    file, old, new, tests, *why = row.replace("\\n", "\n").split("\t")
    loop, _, case = tests.partition("loop:")
    named = [f"tests/training/test_plain_loop.py::test_{test}[{case}]" for test in _LOOP] if case else loop.split(";")
    return Mutant(file, old, new, named, *why)


MUTANTS = [read(row) for row in Path(__file__).with_suffix(".tsv").read_text().splitlines()[1:]]
