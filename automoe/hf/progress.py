"""How reading a checkpoint is shown: a bar with GB/s on a terminal, one line in a log, nothing on other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_S = 0.1  # between two drawings


@contextmanager
def reading(name: str, total_bytes: Callable[[], int], shown: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with every number of bytes that has arrived.

    Args:
        name: of the checkpoint.
        total_bytes: asked for where a bar is drawn.
        shown: this is the rank that shows something.
    """
    if not shown:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda num_bytes: None
        return
    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total_bytes())
        waiting, drawn = 0, time.monotonic()

        def advance(num_bytes: int) -> None:
            nonlocal waiting, drawn
            waiting += num_bytes
            if time.monotonic() - drawn > STEP_S:
                progress.update(task, advance=waiting)
                waiting, drawn = 0, time.monotonic()

        yield advance
        progress.update(task, advance=waiting)
