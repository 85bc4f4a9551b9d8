"""Strict conversion between nested dictionaries and the typed ``Config``.

Hydra composes untyped YAML. Only this module decides what a value may be, so a wrong key or type
gives the same ``ConfigError`` whether it came from a file or from the command line.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from itertools import cycle
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from automoe.config.layout import with_layout
from automoe.config.paths import PathText, checked_path
from automoe.config.plugins import load_plugins, registered_names
from automoe.config.recipe_args import CLASS, SECTION, args_class, default_args
from automoe.config.schema import Config
from automoe.errors import ConfigError

_VARIABLE = re.compile(r"\$\{oc\.env:([^{}]+)\}")


def config_from_dict(raw: dict[str, Any], trusted: bool = True) -> Config:
    """Build a ``Config`` from nested dictionaries; missing keys take the schema's defaults.

    An int is accepted for a float, and so is a numeric string such as ``"1e-3"`` (YAML 1.1 reads it
    as text). Everything else must already have the field's type.

    Args:
        raw: nested dictionaries, as YAML gives them.
        trusted: import the plugins that ``raw`` names, and convert ``recipe_args`` to the dataclass
            ``Args`` that the recipe declares, which may import the recipe's code. If False,
            ``recipe_args`` stays a dictionary.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a value of the wrong type, a
            malformed ``parallel.layout``, or a plugin or recipe that cannot be imported.
    """
    if trusted:
        load_plugins(
            typed("plugins", raw.get("plugins", []))
        )  # they register choices of other keys
    config = with_layout(_to_dataclass(Config, raw, ""))
    return replace(config, recipe_args=_make_args(config)) if trusted else config


def _make_args(config: Config) -> Any:
    """Convert the dictionary ``config.recipe_args`` to the recipe's own dataclass ``Args``.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or keys for a recipe without
            ``Args``.
    """
    cls = args_class(config.recipe)
    key = SECTION
    value = config.recipe_args
    if cls is not None:
        return _to_dataclass(cls, value, f"{SECTION}.")
    if value == {}:
        return value
    if isinstance(value, dict):
        name, value = next(iter(value.items()))
        key = f"{SECTION}.{name}"
    raise ConfigError(
        key,
        value,
        f"unknown key: the recipe {config.recipe} declares no {CLASS}",
        "Leave it out, or name the recipe that has it: recipe=NAME",
    )


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as dictionaries, lists and scalars, ready for YAML or JSON.

    Environment variables are written by name, so files and trackers never see their content.
    """
    return mapped(config, written)


class FromEnvironment(str):
    """Text that contains environment variables; files show their names, not their content.

    Attributes:
        written: ``${oc.env:NAME}`` in place of each variable's content.
    """

    written: str

    def __new__(cls, text: str, written: str) -> FromEnvironment:
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # copied, and sent to other processes
        return str(self), self.written


def written(text: str) -> str:
    """Return ``text``; of a ``FromEnvironment`` the text with ``${oc.env:NAME}`` in place of contents."""
    return text.written if isinstance(text, FromEnvironment) else text


def named_variables(text: str) -> set[str]:
    """Return environment variables that ``text`` names: NAME of each ``${oc.env:NAME}`` in it."""
    return set(_VARIABLE.findall(text))


def from_environment(raw: Any, environment: Mapping[str, str]) -> Any:
    """Return a copy of ``raw`` (nested dictionaries and lists) with each ``${oc.env:NAME}`` replaced by its value.

    A changed text becomes ``FromEnvironment``, which ``config_to_dict`` writes as it was before.
    ``${oc.env:NAME}`` of a variable that ``environment`` lacks stays as written.
    """

    def content(value: Any) -> Any:
        if not isinstance(value, str) or not named_variables(value):
            return value
        text = _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), value)
        return FromEnvironment(text, value)

    return mapped(raw, content)


def leaf_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema that holds a value, such as ``optim.lr``, in order.

    Keys of ``recipe_args`` are left out.

    Args:
        cls: dataclass of the section whose keys are listed.
        prefix: text before each name, such as ``model.``.
    """
    for name, hint in field_types(cls).items():
        if is_section(hint):
            yield from leaf_keys(hint, f"{prefix}{name}.")
        elif hint is not Any:
            yield f"{prefix}{name}"


def check_key(key: str, value: object) -> Any:
    """Return the type hint that the schema gives the dotted ``key``.

    Keys of ``recipe_args`` have ``Any``: the recipe declares them.

    Raises:
        ConfigError: the key is unknown; the message shows ``value`` and the nearest key.
    """
    hint: Any = Config
    parts = key.split(".")
    if parts[0] == SECTION:
        return Any
    parent = ""
    for part in parts:
        if not is_section(hint):
            raise ConfigError(
                key, value, f"{parent} is a single value and has no keys", f"Set {parent}=..."
            )
        parent = f"{parent}.{part}".lstrip(".")
        types = field_types(hint)
        if part not in types:
            raise _unknown_key(parent, value, hint, key)
        hint = types[part]
    return hint


def typed(key: str, value: object) -> Any:
    """Convert ``value`` to the type that the schema gives the dotted ``key``.

    Raises:
        ConfigError: the key is unknown, or ``value`` has another type.
    """
    return converted(check_key(key, value), value, key)


def is_section(hint: object) -> bool:
    """Return True if a field with this type hint is a section (a dataclass), not a single value."""
    return is_dataclass(hint)


def nearest(word: str, choices: list[str], likeness: float = 0.6) -> list[str]:
    """Return the choice most like ``word`` as a list of one; an empty list if none is close.

    Args:
        likeness: smallest ratio of ``difflib`` that counts as close.
    """
    return difflib.get_close_matches(word, choices, 1, likeness)


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the fields of a dataclass of the schema, name -> type hint, in order."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


def _unknown_key(key: str, value: object, cls: type, suffix: str = "") -> ConfigError:
    parent, _, name = key.rpartition(".")
    siblings = list(field_types(cls))
    close = [f"{parent}.{sibling}".lstrip(".") for sibling in nearest(name, siblings)]
    # else the right name under the wrong parent: train.lr for optim.lr
    close = close or [known for known in leaf_keys() if known.endswith(f".{name}")]
    remedy = f"Did you mean {' or '.join(close)}?" if close else f"Keys here: {', '.join(siblings)}"
    rule = f"unknown key: {parent or 'the configuration'} has no {name!r}"
    return ConfigError(suffix or key, value, rule, remedy)


def _wrong_type(key: str, value: object, expected: str) -> ConfigError:
    shown = "null" if value is None else f"{type(value).__name__} {value!r}"
    return ConfigError(key, value, f"expected {expected}, got {shown}", f"Give {key} {expected}")


def _to_dataclass(cls: type, raw: object, prefix: str) -> Any:
    hints = field_types(cls)
    if not isinstance(raw, dict):
        raise _wrong_type(prefix.rstrip("."), raw, f"a mapping with keys {', '.join(hints)}")
    for name, value in raw.items():
        if name not in hints:
            raise _unknown_key(f"{prefix}{name}", value, cls)
    for name, default in default_args(cls).items():
        if default is MISSING and name not in raw:
            key = f"{prefix}{name}"
            raise ConfigError(key, "", "needs a value: it has no default", f"Set {key}=")
    return cls(**{key: converted(hints[key], item, f"{prefix}{key}") for key, item in raw.items()})


def converted(hint: Any, value: Any, key: str) -> Any:
    """Convert ``value`` to the type hint ``hint``; an instance of a dataclass is taken as it is.

    Raises:
        ConfigError: ``value`` has another type; the error names the config key ``key``.
    """
    if is_section(hint):
        return value if isinstance(value, hint) else _to_dataclass(hint, value, f"{key}.")
    if hint is Any:
        return value
    if hint == PathText:
        return checked_path(key, converted(str, value, key))
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, types.UnionType):  # `X | None`, or a list or one value in its place
        choices = [choice for choice in args if choice is not type(None)]
        if value is None and len(choices) < len(args):
            return None
        for choice in choices:
            if len(choices) == 1 or _has_type(value, get_origin(choice) or choice):
                return converted(choice, value, key)
        raise _wrong_type(key, value, " or ".join(map(type_name, choices)))
    if origin is Literal:
        names = args + registered_names(key)
        value = str(value) if isinstance(value, FromEnvironment) else value
        if value is False and "off" in names:  # YAML 1.1 reads a bare `off` as false
            return "off"
        if value in names and type(value) in {type(c) for c in names}:
            return value
        lowered = {str(choice).lower(): choice for choice in names}
        [close] = nearest(str(value).lower(), list(lowered), 0.0)
        raise ConfigError(
            key,
            value,
            f"must be one of {', '.join(map(str, names))}",
            f"Nearest valid choice: {key}={lowered[close]}",
        )
    if origin is dict and isinstance(value, dict):
        return {
            converted(args[0], k, key): converted(args[1], v, f"{key}.{k}")
            for k, v in value.items()
        }
    if origin in (list, tuple):
        expected = f"a list of {type_name(args[0])}"
        if origin is tuple:
            expected = f"a list of {len(args)} values ({', '.join(map(type_name, args))})"
        if not _has_type(value, list) or (origin is tuple and len(value) != len(args)):
            raise _wrong_type(key, value, expected)
        # A list has one type for all its items, a tuple has a type for each.
        items = zip(cycle(args), value, strict=False)
        return origin(converted(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(items))
    if hint is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            return float(value)
    if not _has_type(value, hint):
        raise _wrong_type(key, value, type_name(hint))
    return value


def _has_type(value: Any, hint: Any) -> bool:
    """Return True if ``value`` is exactly of the type ``hint``: ``True`` is no int.

    A tuple counts as a list, and ``FromEnvironment`` as ``str``.
    """
    if hint is list:
        return isinstance(value, (list, tuple))
    text = hint in (str, Annotated)
    return type(value) is hint or (text and type(value) in (str, FromEnvironment))


def type_name(hint: Any) -> str:
    """Return the name of a type for error messages, e.g. ``a whole number`` for ``int``."""
    if get_origin(hint) is list:
        named = {int: "a list of whole numbers", float: "a list of numbers", str: "a list of text"}
        return named.get(get_args(hint)[0], "a list of mappings {key: value}")
    if get_origin(hint) is dict:
        return "a mapping {name: value}"
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    return (kinds | {str: "text", PathText: "text"}).get(hint, str(hint))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every value in nested dictionaries, lists and tuples; return the copy.

    Tuples become lists, and dataclasses dictionaries.
    """
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return change(value)
