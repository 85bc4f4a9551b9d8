"""Plugin functions that ``Run`` calls at four named points of a run (``docs/extend.md``).

Every rank calls every function in the order of registration, so the functions may use collectives.
An exception in a plugin function ends the run, as an exception in the recipe does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from automoe.config.metrics import is_taken
from automoe.config.plugins import registered
from automoe.errors import ConfigError

if TYPE_CHECKING:
    from automoe.run.run import Run


def call_hooks(point: str, *args: Any) -> None:
    """Call the functions that plugins registered for the hook ``point``; ignore their results."""
    for function in registered(point).values():
        function(*args)


def hook_numbers(run: Run, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that plugins' functions for the hook ``run.step`` add to a step's record.

    The functions get a read-only view of the record.

    Raises:
        ConfigError: a name is taken in this record or in the records of other steps, or a value is
            no number.
    """
    numbers: dict[str, float] = {}
    for name, function in registered("run.step").items():
        made = function(run, MappingProxyType({**record, **numbers})) or {}
        for key, value in made.items():
            value = value.item() if hasattr(value, "item") else value
            if key in record or key in numbers or is_taken(str(key)):
                raise ConfigError(
                    "run.step", name, f"{key!r} is in the record already", "Use another name"
                )
            if not isinstance(value, (int, float)):
                rule = f"{key!r} is {type(value).__name__}, and metrics are numbers"
                raise ConfigError("run.step", name, rule, "Return one number for each name")
            numbers[str(key)] = value
    return numbers
