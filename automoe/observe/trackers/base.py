"""Interface of the experiment trackers, which are the other modules of this package."""

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
    """Description of a run, which an experiment tracker receives when it is opened.

    Attributes:
        name: display name of the run; ``tags``: words to find it by.
        group: name that groups runs, such as those of a sweep; "" for none.
        config: the configuration as plain dictionaries, without values from the environment.
        run_dir: the run directory.
        resume_step: last step whose record is kept from an earlier start; None: a new run.
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

    If a method raises an error, the tracker is closed and training continues without it.

    Attributes:
        id: the tracker's own id of the run, with which a later start continues it; "" if files in
            ``run_dir`` suffice.
        places: name -> web page or folder where the user finds the results.
    """

    id: str = ""
    places: dict[str, str]

    def held(self) -> Mapping[int, float | None]:
        """Return step -> loss (None: unknown) of the steps that earlier starts recorded; the base class returns {}."""
        return {}

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the metrics of a step.

        After a return to an earlier checkpoint, steps repeat: the later record replaces the earlier
        one if the tracker can.

        Args:
            numbers: metric -> value, without the step.
        """

    def texts(self, step: int, name: str, rows: Texts) -> None:
        """Record a table of texts.

        Args:
            step: step to which the texts belong.
            name: name of the table.
            rows: rows of the table, each {column: text}; all have the same columns.
        """

    def rewind(self, step: int) -> None:
        """Announce that the steps after ``step`` will run again.

        The base class does nothing: a repeated step then has two points in a plot.
        """

    def finish(self, outcome: Outcome) -> None:
        """Write pending data and close the tracker.

        Args:
            outcome: how the run ended: ``done``, ``preempted`` or ``failed``.
        """


def one_line(error: Exception, config: Config) -> str:
    """Return an error of a tracker's library in one line of up to 200 characters, logins masked.

    If ``config.observe`` has a value from the environment (an address or a name), the result is
    only the error's type, because libraries quote such values, which may be secret.
    """
    kind = type(error).__name__
    if any(isinstance(value, FromEnvironment) for value in vars(config.observe).values()):
        return kind
    return hidden(" ".join(f"{kind}: {error}".split()))[:200]


def hidden(address: str) -> str:
    """Return a web address with logins masked: ``https://***@host``, ``?token=***``."""
    return SECRET.sub(r"\1***", LOGIN.sub("://***@", address))
