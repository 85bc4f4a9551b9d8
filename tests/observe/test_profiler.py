from __future__ import annotations

import gzip
import json

import pytest
import torch

from automoe.config.schema import Config
from automoe.config.validate import parse_profile_steps
from automoe.errors import ConfigError
from automoe.observe.profiler import profile_steps
from automoe.passes.trace import phase


def profiled(run_dir, window: str, steps: range, die_at: int | None = None) -> list[int]:
    """The steps after which there is a trace for the first time."""
    config = Config()
    config.observe.profile_steps = window
    written: list[int] = []
    with profile_steps(config, run_dir, rank=3):
        for step in steps:
            with phase("step", step), phase(f"work of step {step}", step):
                torch.ones(4, 4) @ torch.ones(4, 4)
                if step == die_at:
                    raise RuntimeError("dies")
            if not written and list(run_dir.glob("profile/*")):
                written.append(step)
    return written


def events(path) -> set[str]:
    names = {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    return {name for name in names if "step" in name}


def test_the_window_and_nothing_else_is_traced(tmp_path):
    written = profiled(tmp_path, "3-4", range(1, 7))
    path = tmp_path / "profile" / "rank3-steps-3-4.json.gz"
    assert written == [4]
    assert events(path) == {"step", "work of step 3", "work of step 4"}


def test_off_writes_nothing(tmp_path):
    assert profiled(tmp_path, "", range(1, 4)) == []
    assert not list(tmp_path.iterdir())


def test_a_run_that_dies_inside_the_window_keeps_what_it_has(tmp_path):
    with pytest.raises(RuntimeError, match="dies"):
        profiled(tmp_path, "2-9", range(1, 9), die_at=3)
    assert events(tmp_path / "profile" / "rank3-steps-2-unfinished.json.gz") == {
        "step",
        "work of step 2",
        "work of step 3",
    }


@pytest.mark.parametrize("text, window", [("", None), ("10-12", (10, 12)), ("7", (7, 7))])
def test_windows(text, window):
    assert parse_profile_steps(text) == window


@pytest.mark.parametrize("text", ["12-10", "0-3", "a", "3-", "1-2-3"])
def test_windows_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="observe.profile_steps"):
        parse_profile_steps(text)
