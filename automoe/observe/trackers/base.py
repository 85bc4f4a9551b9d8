"""Interface of the experiment trackers; each tracker is a module of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from automoe.config.convert import FromEnvironment
from automoe.config.rules import LOGIN, SECRET
from automoe.config.schema import Config

Outcome = Literal["done", "preempted", "failed"]
Numbers = Mapping[str, float]  # metric -> value
Texts = Sequence[Mapping[str, str]]  # rows of a table, with equal columns
WITHOUT = "training goes on without it"


@dataclass(frozen=True)
class About:
    """Description of a run that an experiment tracker receives when it starts.

    Attributes:
        config: the configuration as plain dictionaries, without values from the environment.
        resume_step: last step of the existing record that is kept; None: a new run.
        earlier: this tracker's id of the run from an earlier start; "" if there is none.
        warn: function that shows a line to the user.
    """

    name: str
    group: str
    tags: list[str]
    config: dict[str, Any]
    run_dir: Path
    resume_step: int | None
    earlier: str
    warn: Callable[[str], object]


class Tracker:
    """Base class of an open experiment tracker.

    If a method raises, the tracker is dropped and training goes on.

    Attributes:
        id: the tracker's own id of the run, with which a later start continues it; "" if files in
            ``run_dir`` suffice.
        places: name -> page or folder to show to the user.
    """

    id: str = ""
    places: dict[str, str]

    def held(self) -> Mapping[int, float | None]:
        """Return step -> loss of the steps that earlier starts recorded; None: unknown loss."""
        return {}

    def log(self, step: int, numbers: Numbers) -> None:
        """Record a step. After a return to a checkpoint steps repeat; the later record counts.

        ``numbers`` does not contain the step.
        """

    def texts(self, step: int, name: str, rows: Texts) -> None:
        """Record a table of texts; all rows have the same columns."""

    def rewind(self, step: int) -> None:
        """Announce that the steps after ``step`` will run again.

        By default nothing happens: a repeated step becomes a second point at the same place.
        """

    def finish(self, outcome: Outcome) -> None:
        """Write pending data and close."""


def one_line(error: Exception, config: Config) -> str:
    """Return the one-line text of a library's error for a warning, with logins in addresses masked.

    If the configuration has an address or name from the environment, return only the error's type,
    because libraries repeat parts of such values.
    """
    kind = type(error).__name__
    if any(isinstance(value, FromEnvironment) for value in vars(config.observe).values()):
        return kind
    return hidden(" ".join(f"{kind}: {error}".split()))[:200]


def hidden(address: str) -> str:
    """Return a web address with logins masked: ``https://***@host``, ``?token=***``."""
    return SECRET.sub(r"\1***", LOGIN.sub("://***@", address))
