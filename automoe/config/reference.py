"""Reference of every configuration key (type, default, meaning), read from the schema's source.

``automoe train --help mesh`` shows a section; ``docs/write_config.py`` writes ``docs/config.md``
with all sections.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
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
    """Yield (name, one-line docstring, keys) of each section, outer sections first."""
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
    """Return ``sections`` of the keys that a recipe declares; an empty list if it declares none."""
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
    """Return a dataclass's docstring, and field name -> comments above and after the field."""
    text = inspect.getsource(cls)
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    [node] = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    texts: dict[str, str] = {}
    after = node.lineno
    for item in node.body:
        after, last = item.end_lineno or after, after
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            lines = [*range(last + 1, item.lineno), after]
            texts[item.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return " ".join((ast.get_docstring(node) or "").split()), texts


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
    """Return a default as it is typed on a command line."""
    if value is MISSING:
        return "???"
    return f"{value:g}" if isinstance(value, float) else shown(value)
