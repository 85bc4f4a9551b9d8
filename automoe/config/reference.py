"""Reference of every configuration key (type, default, meaning), read from the schema's source.

``automoe train --help mesh`` shows a section; ``docs/write_config.py`` writes ``docs/config.md``
with all sections.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import automoe.config.schema as schema
from automoe.config.convert import check_key, field_types, is_section, type_name
from automoe.config.recipe_args import SECTION, args_class, default_args
from automoe.config.rule_engine import shown
from automoe.errors import ConfigError

WIDTH = 80  # columns of a terminal


@dataclass(frozen=True)
class Key:
    """One configuration key, as text for a reader.

    Attributes:
        name: dotted name, e.g. ``mesh.pp``.
        kind: type in words, e.g. ``a whole number``.
        default: the default as typed on a command line.
        comment: the schema's comment on the field.
    """

    name: str
    kind: str
    default: str
    comment: str


def sections(cls: type = schema.Config, prefix: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """Yield (dotted name, docstring as one line, keys) of each section, outer sections first.

    Args:
        cls: dataclass of the outermost section.
        prefix: dotted name of ``cls`` with a point at its end; empty for the whole schema.
    """
    document, comments = _source(cls)
    types = field_types(cls)
    defaults = default_args(cls)
    keys = [
        Key(prefix + name, _kind(hint), _typed(defaults[name]), comments.get(name, ""))
        for name, hint in types.items()
        if not is_section(hint)
    ]
    yield prefix.rstrip("."), document, keys
    for name, hint in types.items():
        if is_section(hint):
            yield from sections(hint, f"{prefix}{name}.")
        elif get_origin(hint) is list and is_section(item := get_args(hint)[0]):
            yield from sections(item, f"{prefix}{name}[].")


def args_sections(recipe: str) -> list[tuple[str, str, list[Key]]]:
    """Return (dotted name, docstring as one line, keys) of ``recipe_args`` and of each section in it.

    The list is empty if ``recipe`` declares no keys.
    """
    cls = args_class(recipe)
    return [] if cls is None else list(sections(cls, f"{SECTION}."))


def help_on(name: str, recipe: str = schema.Config.recipe) -> str:
    """Return help text for a terminal on one key, or on a section and the sections inside it.

    Args:
        name: dotted name of a key or section.
        recipe: recipe that declares the keys under ``recipe_args``.

    Raises:
        ConfigError: the key does not exist; the message names the nearest one.
    """
    check_key(name, "")
    lines: list[str] = []
    declared = args_sections(recipe) if name.partition(".")[0] == SECTION else []
    if name == SECTION and not declared:
        return f"{SECTION}: the recipe {recipe} has no keys of its own; recipe=NAME names another"
    for section, document, keys in declared or sections():
        inside = [key for key in keys if f"{key.name}.".startswith(f"{name}.")]
        if not inside:
            continue
        if name != inside[0].name:
            title = f"{section}: {document}" if document else section
            lines += textwrap.wrap(title.replace("``", ""), WIDTH) + [""]
        for key in inside:
            lines.append(f"  {key.name}={key.default}   ({key.kind})")
            lines += textwrap.wrap(
                key.comment, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
        lines.append("")
    if not lines:
        known = ", ".join(key.name for _, _, keys in declared for key in keys) or "none"
        raise ConfigError(
            name, "", f"unknown key: the recipe {recipe} declares no such key", f"Its keys: {known}"
        )
    return "\n".join(lines).rstrip()


@cache
def _source(cls: type) -> tuple[str, dict[str, str]]:
    """Return a dataclass's docstring, and the comment of each field by the field's name.

    The comment stands above the field or behind it in the source.
    """
    document = " ".join((cls.__doc__ or "").split())
    if document.startswith(f"{cls.__name__}("):  # dataclass wrote it
        document = ""
    texts = defaultdict[str, list[str]](list)
    above: list[str] = []
    name = ""
    for line in inspect.getsource(cls).splitlines():
        code, _, comment = line.partition("# ")
        if field := re.match(r"    (\w+): ", code):
            name = field[1]
            texts[name] = above
            above = []
        if comment:
            (texts[name] if code.strip() else above).append(comment)
    return document, {name: " ".join(lines) for name, lines in texts.items()}


def _kind(hint: Any) -> str:
    if hint is Any:
        return "its keys"
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join("null" if part is type(None) else _kind(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return f"{len(get_args(hint))} numbers"
    return type_name(hint)


def _typed(value: object) -> str:
    """Return a default value as one types it on a command line, e.g. ``true`` or ``[a,b]``."""
    if value is MISSING:
        return "???"
    return f"{value:g}" if isinstance(value, float) else shown(value)
