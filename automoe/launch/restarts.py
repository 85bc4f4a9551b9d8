"""Whether a run that failed is worth another attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automoe.launch.run_dir import describe_error

_LOST_ANYWAY = "it is not an accident that another attempt could be spared"


@dataclass
class Restarts:
    """The failed attempts of one run.

    Args:
        limit: ``launch.max_restarts``.

    Attributes:
        failures: per failed attempt its number, the last step it recorded (None: it kept no record of
            steps) and its first error.
    """

    run_dir: Path
    limit: int
    failures: list[dict[str, Any]] = field(default_factory=list)

    def refusal(self, error: dict[str, Any]) -> str | None:
        """Take note that an attempt ended with ``error``; None if another may follow, else why not."""
        step = last_step(self.run_dir)
        furthest = max((failure["step"] or 0 for failure in self.failures), default=-1)
        self.failures.append({"attempt": len(self.failures) + 1, "step": step, "error": error})
        if error["for_user"] and error["type"] != "LaunchError":
            return f"{error['type']}: {_LOST_ANYWAY}"
        if len(self.failures) > self.limit:
            return f"launch.max_restarts={self.limit} is used up"
        if step is not None and len(self.failures) > 1 and step <= furthest:
            return f"the last attempt got no further than step {step}, and an earlier one to step {furthest}"
        return None

    def describe(self) -> str:
        """The last failure and what follows, for a terminal."""
        failure = self.failures[-1]
        after = "" if failure["step"] is None else f" after step {failure['step']}"
        return (
            f"attempt {failure['attempt']} failed{after}: {describe_error(failure['error'])}\n"
            f"starting again from the newest checkpoint: restart {len(self.failures)} of at most {self.limit}"
        )


def last_step(run_dir: Path) -> int | None:
    """The last step in ``metrics.jsonl``; None without that file, 0 before its first line is complete."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1_000_000))  # lines are a few kB, and the last may be cut
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0
