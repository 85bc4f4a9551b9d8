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
