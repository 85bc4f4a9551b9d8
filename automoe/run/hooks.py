"""Calls of plugin functions at the hooks ``run.start``, ``run.step``, ``run.save``, ``run.finish``.

``docs/extend.md`` says how a plugin registers them. Every rank calls every function in the order of
registration, so the functions may use collectives. An exception in a plugin function ends the run,
as an exception in the recipe does.
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
    """Call the plugin functions of a hook with ``args``; ignore their results.

    Args:
        point: name of the hook, such as ``run.save``.
    """
    for function in registered(point).values():
        function(*args)


def hook_numbers(run: Run, record: Mapping[str, Any]) -> dict[str, float]:
    """Call plugin functions of the hook ``run.step``; return the numbers they add to the record.

    The functions get ``run`` and a read-only view of the step's record.

    Raises:
        ConfigError: a returned name is already a key of step records, or a value is not a number.
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
