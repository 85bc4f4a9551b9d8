"""What every tracker is given and does. A tracker is a file beside this one, by its own library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from automoe.config.convert import FromEnvironment
from automoe.config.rules import LOGIN, SECRET
from automoe.config.schema import Config

Outcome = Literal["done", "preempted", "failed"]
WITHOUT = "training goes on without it"


@dataclass(frozen=True)
class About:
    """A run as trackers show it.

    Attributes:
        config: as plain dictionaries, without what the environment holds.
        resume_step: the last step that stays of the record that is there; None is a new run.
        earlier: id by which this tracker knows the run already; empty where it does not.
        warn: takes a line for the user.
    """

    name: str
    group: str
    tags: list[str]
    config: dict[str, Any]
    run_dir: Path
    resume_step: int | None
    earlier: str
    warn: Callable[[str], object]


class Tracker(Protocol):
    """One open tracker. Whatever a method raises ends its use with a warning, and training goes on.

    Attributes:
        id: by which the next start of the run finds it again; empty where files in ``run_dir`` are all there is.
        places: what to tell the user, by name: a page, a folder.
    """

    id: str
    places: dict[str, str]

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record a step; one that is there already is repeated after a fall back, and the later one counts."""

    def texts(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record a table of texts; every row has the same columns."""

    def rewind(self, step: int) -> None:
        """Steps after ``step`` are run again."""

    def finish(self, outcome: Outcome) -> None:
        """Write what waits, and close."""


def one_line(error: Exception, config: Config) -> str:
    """An error of a library for a warning, without a login in an address.

    Its kind alone where an address or name is from the environment: libraries repeat those in pieces.
    """
    kind = type(error).__name__
    if any(isinstance(value, FromEnvironment) for value in vars(config.observe).values()):
        return kind
    return hidden(" ".join(f"{kind}: {error}".split()))[:200]


def hidden(address: str) -> str:
    """``https://***@host`` in place of ``https://user:password@host``; ``?token=***``."""
    return SECRET.sub(r"\1***", LOGIN.sub("://***@", address))
