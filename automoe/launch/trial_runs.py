"""Short runs by the command that a user would type, and the comparison of what they recorded."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from automoe.launch.fork_server import python
from automoe.launch.local import last_step
from automoe.observe.metrics import read_metrics
from automoe.storage.guarded import die_with_parent

# Parts of the names of a record's values that are times, memory, or checksums over these.
_MEASURED = ("second", "memory", "checkpoint_", "mfu", "slowest", "crc32")

Records = list[dict[str, Any]]


class TrialError(RuntimeError):
    """Failure of a run; the message is the run's output."""


def train(run_dir: Path, overrides: Sequence[str]) -> Records:
    """Train to the end in a separate process; return the records of the steps (``metrics.jsonl``).

    ``overrides`` are words of the command line, such as ``mesh.ep=2``.

    Raises:
        TrialError: the run failed.
    """
    process = _start(run_dir, overrides)
    said, _ = process.communicate()  # a run that hangs ends itself: launch.timeout_s
    if process.returncode:
        raise TrialError(said)
    return read_metrics(run_dir)


def train_and_kill(run_dir: Path, overrides: Sequence[str], after: int) -> int:
    """Start a run, kill it by SIGKILL once it has recorded step ``after``; return its last recorded step.

    ``overrides`` are words of the command line, such as ``mesh.ep=2``.

    Raises:
        TrialError: the run ended before that step.
    """
    process = _start(run_dir, overrides)
    while (last_step(run_dir) or 0) < after:
        if process.poll() is not None:
            raise TrialError(process.communicate()[0])
        time.sleep(0.02)
    process.kill()
    process.communicate()  # ends when no rank is left that could print more
    return last_step(run_dir) or 0


def differing(expected: Records, got: Records) -> list[str]:
    """Return lines such as ``step 3: loss, grad_norm`` that name what differs between two runs.

    A further line says if their numbers of steps differ. Times, memory, MFU, checkpoint figures and
    checksums are not compared. Arguments are the records of each run's steps.
    """
    lines = []
    if len(expected) != len(got):
        lines.append(f"{len(got)} steps instead of {len(expected)}")
    for mine, theirs in zip(got, expected, strict=False):
        names = sorted(numbers_of(mine) | numbers_of(theirs))
        # As text, NaN equals NaN, and 1 is not 1.0.
        wrong = [n for n in names if json.dumps(mine.get(n)) != json.dumps(theirs.get(n))]
        lines += [f"step {theirs['step']}: {', '.join(wrong)}"] if wrong else []
    return lines


def numbers_of(record: dict[str, Any]) -> set[str]:
    """Return the names of a step record's values that a repeated run must reproduce: not times, memory, checksums."""
    return {name for name in record if not any(part in name for part in _MEASURED)}


def _start(run_dir: Path, overrides: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python(), "automoe.train", f"run_dir={run_dir}", *overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
