"""Torch profiler traces of a few steps: ``run_dir/profile/rank0-steps-10-12.json.gz``.

Open a trace in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from automoe.config.schema import Config
from automoe.config.validate import parse_profile_steps
from automoe.passes.trace import listening

PROFILE_DIR = "profile"


@contextmanager
def profile_steps(config: Config, run_dir: str | os.PathLike[str], rank: int) -> Iterator[None]:
    """Profile this rank in a ``with`` block, during the steps of ``observe.profile_steps``.

    Step numbers are those of the whole run, so a resumed run profiles only the steps that remain of
    the range. The trace is written to ``run_dir/profile``, also if the run fails within the range.
    """
    window = parse_profile_steps(config.observe.profile_steps)
    if window is None:
        yield
        return
    running = {}  # First step -> profile in progress; at most one entry.

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
