"""Signals that arrive faster than they are handled: a scheduler and the launcher both ask the ranks to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.command import PATIENCE_S, ROOT

RANK = """
import sys
from pathlib import Path
from automoe.launch import worker
from automoe.training.context import StopRequest

stop = StopRequest()
worker._handle_signals(stop)
print("listens", flush=True)
while not Path(sys.argv[1]).exists():
    pass
sys.exit(0 if stop.requested else "the request was lost")
"""


def test_a_burst_of_signals_does_not_stop_the_rank_in_its_handler(tmp_path: Path) -> None:
    """With a lock in the handler this hangs: the second signal waits for what the first one holds."""
    done = tmp_path / "done"
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(done)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert rank.stdout is not None and rank.stdout.readline() == "listens\n"
    try:
        for _ in range(5000):
            rank.send_signal(signal.SIGTERM)
        done.touch()
        assert rank.wait(PATIENCE_S) == 0
    finally:
        rank.kill()
