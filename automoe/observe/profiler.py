"""A torch profiler window over a few steps: ``run_dir/profile/rank0-steps-10-12.json.gz``.

Open the trace in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from automoe.config.schema import Config
from automoe.config.validate import parse_profile_steps
from automoe.trace import listening

PROFILE_DIR = "profile"


class StepProfiler:
    """Profiles the steps of ``observe.profile_steps`` on this rank; does nothing outside them.

    Use as a context manager around the loop, whose steps are phases (``automoe.trace``) named ``step``. Their
    numbers are the run's own, so a resumed run profiles the part of the window that it runs; a run that dies
    inside the window still writes what it has.
    """

    def __init__(self, config: Config, run_dir: str | os.PathLike[str], rank: int) -> None:
        self._window = parse_profile_steps(config.observe.profile_steps)
        self._directory, self._rank = Path(run_dir) / PROFILE_DIR, rank
        self._profile: Any = None
        self._first = 0
        self._listening = listening(self._hear)

    def _hear(self, name: str, step: int | None, edge: str) -> None:
        assert self._window is not None
        if name != "step" or step is None:
            return
        if edge == "begin" and self._profile is None and self._window[0] <= step <= self._window[1]:
            self._start(step)
        elif edge == "end" and self._profile is not None and step >= self._window[1]:
            self._write(step)

    def _start(self, step: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._first = step
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _write(self, last: int | None) -> None:
        profile, self._profile = self._profile, None
        profile.stop()
        self._directory.mkdir(exist_ok=True)
        steps = f"{self._first}-{last}" if last is not None else f"{self._first}-unfinished"
        path = self._directory / f"rank{self._rank}-steps-{steps}.json.gz"
        profile.export_chrome_trace(str(path))

    def __enter__(self) -> StepProfiler:
        if self._window is not None:
            self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._window is not None:
            self._listening.__exit__(None, None, None)
        if self._profile is not None:
            self._write(None)
