"""Faults on demand: what the variable may say, and that each kind does what it says, where it says."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from automoe.errors import ConfigError
from automoe.passes.trace import phase
from tests.support.fault_points import AT_PHASES, POINTS, VARIABLE, Fault, InjectedFault, fault_point, faults, parse

WRONG = {
    "explode:at=renamed": "'explode' is not a kind of fault. Kinds: kill, raise, sleep, hold, enospc",
    "kill": "at='' is not a fault point. Points: started, resuming",
    "kill:at=nowhere": "at='nowhere' is not a fault point. Points: started, resuming",
    "kill:at=renamed:foo=1": "'foo=1' is not a field. Fields: at, rank, step",
    "hold:at=renamed": "none is named. Add until=PATH",
    "kill:at=renamed:step": "'step' is not a field",
    "kill:at=renamed:step=1:step=2": "'step=2' is not a field",
    "kill:at=renamed:step=two": "invalid literal .* rank, step and hit are whole numbers",
    "kill:at=renamed;raise:at=renamed:rank=x": "rank, step and hit are whole numbers",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_understood_is_refused_at_any_point(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=WRONG[text]):
        fault_point("step_end", 1)


def test_fields_are_read() -> None:
    assert parse("kill:rank=1:at=shard_written:step=4") == (Fault("kill", "shard_written", rank=1, step=4),)
    assert parse("sleep:rank=all:at=forward:seconds=0.5:hit=2;raise:at=renamed:once=x") == (
        Fault("sleep", "forward", hit=2, seconds=0.5),
        Fault("raise", "renamed", once="x"),
    )


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in POINTS:
        fault_point(name, 1)


def test_a_fault_fires_on_its_rank_at_its_point_in_its_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "raise:rank=0:at=renamed:step=4")
    fault_point("renamed", 3)
    fault_point("manifest_written", 4)
    with pytest.raises(InjectedFault, match="raise on rank 0 at renamed, step 4"):
        fault_point("renamed", 4)
    monkeypatch.setenv("RANK", "1")
    fault_point("renamed", 4)


def test_hit_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "raise:at=forward:step=99:hit=2")
    fault_point("forward", 99)
    with pytest.raises(InjectedFault):
        fault_point("forward", 99)
    fault_point("forward", 99)
    monkeypatch.setenv(VARIABLE, f"raise:at=forward:once={tmp_path / 'fired'}")
    with pytest.raises(InjectedFault):
        fault_point("forward", 1)
    fault_point("forward", 1)
    assert (tmp_path / "fired.rank0").exists()


def test_points_are_begins_and_ends_of_phases() -> None:
    assert set(AT_PHASES.values()) | {"started", "shard_write"} == set(POINTS)
    with faults("raise:at=forward:step=2"), phase("forward_backward", 1):
        pass
    with faults("raise:at=forward:step=2"), pytest.raises(InjectedFault, match="at forward, step 2"):
        with phase("forward_backward", 2):
            raise AssertionError("begins after the fault")
    with phase("forward_backward", 2):
        pass
    with faults("raise:at=before_collective"), pytest.raises(ZeroDivisionError):
        with phase("forward_backward", 2):
            raise ZeroDivisionError  # a phase that raises has no end


def test_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "enospc:at=shard_write")
    with pytest.raises(OSError) as full:
        fault_point("shard_write", 1)
    assert full.value.errno == errno.ENOSPC
    monkeypatch.setenv(VARIABLE, "sleep:at=forward:seconds=0.2")
    before = time.monotonic()
    fault_point("forward", 1)
    assert time.monotonic() - before >= 0.2
    there = tmp_path / "there"
    monkeypatch.setenv(VARIABLE, f"hold:at=forward:until={there}")
    threading.Timer(0.2, there.touch).start()
    fault_point("forward", 1)
    assert there.exists()
    monkeypatch.setenv(VARIABLE, "kill:at=started")
    code = "from tests.support.fault_points import fault_point; fault_point('started'); print('alive')"
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "")
