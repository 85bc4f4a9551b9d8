"""Phases of a run: what listeners are told, and when."""

from __future__ import annotations

import subprocess
import sys

import pytest

from automoe.passes.trace import listening, phase

Told = list[tuple[str, int | None, str]]


def test_listeners_are_told_of_begins_and_ends_in_order() -> None:
    told: Told = []
    with listening(lambda *edge: told.append(edge)):
        with phase("step", 3), phase("save"):
            told.append(("inside", None, ""))
    with phase("step", 4):
        pass
    assert told == [
        ("step", 3, "begin"),
        ("save", None, "begin"),
        ("inside", None, ""),
        ("save", None, "end"),
        ("step", 3, "end"),
    ]


def test_a_phase_that_raises_has_no_end_and_a_listener_that_raises_is_heard() -> None:
    told: Told = []
    with listening(lambda *edge: told.append(edge)):
        with pytest.raises(ZeroDivisionError), phase("step", 1):
            raise ZeroDivisionError
    assert told == [("step", 1, "begin")]

    def listener(name: str, step: int | None, edge: str) -> None:
        if edge == "end":
            raise InterruptedError(name)

    with pytest.raises(InterruptedError, match="save"), listening(listener), phase("step"), phase("save"):
        pass
    with phase("save"):  # nobody listens any more
        pass


def test_a_phase_needs_no_torch() -> None:
    code = "import sys\nfrom automoe.passes.trace import phase\nwith phase('step', 1): pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
