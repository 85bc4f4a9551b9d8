"""Plugins: names that a user's package adds to the configuration.

Plugins can be model families, dispatchers, expert backends, data sources, losses and functions that
run at fixed points of a run.

    # my_package.py
    from automoe.config.plugins import register

    register("data.kind", "csv", "my_package.source:CSV")

    automoe train plugins=[my_package] data.kind=csv data.path=texts

A plugin is imported by the process that reads the command line and by every rank. It runs with the
user's rights. For safety, a plugin that only a stored run or a checkpoint names is not imported:
the user must name it too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from automoe.config import schema
from automoe.config.shipped import load_file, working_directory_last
from automoe.errors import ConfigError

# Functions that every rank calls, all of them and not one by name: see automoe.run.hooks.
RUN_POINTS = (
    "run.start",  # a function of the automoe.run.run.Run, called before the first step
    # a function of the Run and the step's record, which returns a dictionary of more numbers, or None
    "run.step",
    "run.save",  # a function of the Run and the folder of a checkpoint that was saved
    "run.finish",  # a function of the Run, called after the last step and the export
)
# Keys under which something may be registered; docs/extend.md has examples.
KINDS = (
    "model.family",  # automoe.hf.families.family.Family whose model_type is the name
    # a function of num_experts and a moe.dispatch.base.DispatchGroup that returns a Dispatcher
    "moe.dispatcher",
    # a function with the signature of automoe.moe.experts.ExpertBackend, which checks its own limits
    "moe.experts",
    "data.kind",  # automoe.data.corpora.Source
    "train.loss",  # automoe.model.loss.Loss: a function of single tokens' losses and LossInputs
    *RUN_POINTS,
)
_registered: dict[str, dict[str, Any]] = {key: {} for key in KINDS}
# Found as plugins are, since the trainer imports nothing of their rooms: the family of classes of transformers, and
# other packages' kernels.
_SHIPPED = {
    "model.family=transformers": "automoe.classes.family:FAMILY",
    "moe.dispatcher=deepep": "automoe.interop.deepep:dispatcher",
    "moe.experts=te": "automoe.interop.transformer_engine:experts",
    "kernels.attention=te": "automoe.interop.transformer_engine:attention",
    "kernels.norm=te": "automoe.interop.transformer_engine:norm",
}
LOADED: set[str] = set()  # names that ``load_plugins`` has imported in this process


def register(key: str, name: str, value: Any) -> None:
    """Make ``key=name`` a valid setting that stands for ``value``.

    Args:
        key: a configuration key that takes plugins (listed in ``KINDS``), such as ``data.kind`` or
            ``train.loss``.
        name: the new choice for ``key``.
        value: the class, function or object, of the kind that ``KINDS`` lists for ``key``; or
            ``"module:attribute"``, which is imported at its first use. Prefer the text for modules
            that import torch: the configuration is checked before torch is imported.

    Raises:
        ConfigError: ``key`` takes no plugins, or ``name`` is taken.
    """
    if key not in KINDS:
        raise ConfigError(
            "plugins", key, "nothing can be registered under this key", f"Keys: {', '.join(KINDS)}"
        )
    section, _, leaf = key.partition(".")
    if key not in RUN_POINTS and name in get_args(
        get_type_hints(get_type_hints(schema.Config)[section])[leaf]
    ):
        raise ConfigError(
            key, name, "automoe itself uses this name", "Register it under another name"
        )
    earlier = _registered[key].setdefault(name, value)
    if earlier is not value and earlier != value:
        raise ConfigError(
            key, name, f"it is registered already, for {earlier}", "Choose another name"
        )


def registered(key: str) -> dict[str, Any]:
    """Return name -> object of everything that plugins registered under ``key``.

    Raises:
        ConfigError: a ``"module:attribute"`` cannot be imported.
    """
    return {name: look_up(key, name) for name in _registered[key]}


def look_up(key: str, name: str) -> Any:
    """Return the object that a plugin or automoe registered for ``key=name``; None if none did.

    Raises:
        ConfigError: a ``"module:attribute"`` cannot be imported.
    """
    value = _registered.get(key, {}).get(name) or _SHIPPED.get(f"{key}={name}")
    if not isinstance(value, str):
        return value
    module, _, attribute = value.partition(":")
    try:
        if module not in sys.modules:
            with working_directory_last():
                importlib.import_module(module)
        return getattr(sys.modules[module], attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            key, name, f"{value} cannot be imported: {error}", "Correct register()"
        ) from error


def registered_names(key: str) -> tuple[str, ...]:
    """Return the names registered under ``key``, without importing their objects."""
    return tuple(_registered.get(key, ()))


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins: ``names`` are those of modules, or of files that end in ``.py``.

    Raises:
        ConfigError: one cannot be imported.
    """
    for name in names:
        try:
            with working_directory_last():
                load_file(name) if name.endswith(".py") else importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                "plugins",
                name,
                f"cannot be imported: {error}",
                "Install it, or start in its directory",
            ) from error
        LOADED.add(name)
