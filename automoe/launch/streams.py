"""Standard streams that cannot end a run: a terminal that is closed, a full disk, a reader that has gone."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class Outlet:
    """Text stream to one or more others. A line that one of them does not take is lost there, and the run goes on.

    Whatever else is asked of it, the first one answers.
    """

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams[0], name)


def outlive_streams() -> None:
    """From now on neither this process nor its children depend on who reads their standard output and error."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would be every child's standard output
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
            os.set_inheritable(number, True)
    sys.stdout, sys.stderr = Outlet(sys.stdout), Outlet(sys.stderr)
