"""A mistake of one line, and the tests that should notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in ``file``, and one of ``tests`` fails, unless ``lives_because`` says why none can."""

    file: str
    old: str
    new: str
    tests: list[str]
    lives_because: str = ""


def loop(case: str) -> list[str]:
    """One run against the plain loop over transformers."""
    tests = (
        "every_recorded_number_is_the_plain_loops",
        "tokens_of_every_expert_are_counted_without_padding",
        "validation_is_a_mean_over_tokens",
        "every_weight_of_the_exported_checkpoint_is_the_plain_loops",
    )
    return [f"tests/training/test_plain_loop.py::test_{test}[{case}]" for test in tests]
