"""A torch profiler window over a few steps: ``run_dir/profile/rank0-steps-10-12.json.gz``.

Open the trace in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from automoe.config.schema import Config
from automoe.config.validate import parse_profile_steps
from automoe.storage.trace import listening

PROFILE_DIR = "profile"


@contextmanager
def profile_steps(config: Config, run_dir: str | os.PathLike[str], rank: int) -> Iterator[None]:
    """Profile the steps of ``observe.profile_steps`` that run meanwhile, on this rank.

    Steps are phases (``automoe.storage.trace``) named ``step``. Their numbers are the run's own, so a resumed run
    profiles the part of the window that it runs; a run that dies inside the window still writes what it has.
    """
    window = parse_profile_steps(config.observe.profile_steps)
    if window is None:
        yield
        return
    running: dict[int, profile] = {}  # first step -> the profile; at most one

    def listener(name: str, step: int | None, edge: str) -> None:
        if name != "step" or step is None:
            return
        if edge == "begin" and not running and window[0] <= step <= window[1]:
            running[step] = profile(record_shapes=True)
            running[step].start()
        elif edge == "end" and running and step >= window[1]:
            write(str(step))

    def write(last: str) -> None:
        first, ended = running.popitem()
        ended.stop()
        directory = Path(run_dir) / PROFILE_DIR
        directory.mkdir(exist_ok=True)
        ended.export_chrome_trace(str(directory / f"rank{rank}-steps-{first}-{last}.json.gz"))

    with listening(listener):
        try:
            yield
        finally:
            if running:
                write("unfinished")
