"""Keys of a recipe's own: the dataclass ``Args`` in its file, found without importing the recipe.

A recipe imports torch, and a configuration is checked before that. So of the file's top-level statements those alone
are run that ``Args`` needs: the class, and the imports, constants and classes that it names.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

from automoe.config.schema import Config
from automoe.config.shipped import find_recipe
from automoe.errors import ConfigError

SECTION, CLASS = "recipe_args", "Args"
_found: dict[Path, tuple[str, type | None]] = {}  # file -> its text, and what that text declares


def args_class(recipe: str) -> type | None:
    """The dataclass ``Args`` of a recipe; None where it declares none.

    Raises:
        ConfigError: no such recipe, or an ``Args`` that cannot be read.
    """
    file = recipe_file(recipe)
    if file is None:
        return None
    try:
        text = file.read_text()
        if file not in _found or _found[file][0] != text:
            _found[file] = text, _read(file, text, recipe) if f"class {CLASS}" in text else None
    except Exception as error:  # whatever a user's own statements raise
        rule = f"{CLASS} of {file} cannot be read: {type(error).__name__}: {error}"
        raise ConfigError("recipe", recipe, rule, "Mend it") from error
    cls = _found[file][1]
    if cls is not None and not is_dataclass(cls):
        raise ConfigError("recipe", recipe, f"{CLASS} of {file} is no dataclass", "Write @dataclass above it")
    return cls


def recipe_file(recipe: str) -> Path | None:
    """The source of a recipe; None of a module without one. Raises ``ConfigError``: no such recipe."""
    found = find_recipe(recipe)
    if isinstance(found, str):
        spec = importlib.util.find_spec(found)
        found = Path(spec.origin or "") if spec is not None else Path()
    return found if found.suffix == ".py" else None


def default_args(args: Any) -> dict[str, Any]:
    """What the fields of a dataclass, or of an object of one, are unless they are set; MISSING without a default."""
    own = fields(args) if is_dataclass(args) else ()
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in own}


def check_args(config: Config) -> None:
    """Raise ``ConfigError`` where a number of ``recipe_args`` is not finite, or its ``check(config)`` finds a fault."""
    args = config.recipe_args
    if not is_dataclass(args):
        return
    for field in fields(args):
        value, key = getattr(args, field.name), f"{SECTION}.{field.name}"
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(key, value, "must be a finite number", "Write one")
    if hasattr(args, "check"):
        try:
            args.check(config)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(SECTION, "", str(error), f"The recipe {config.recipe} asks for it") from error


def _read(file: Path, text: str, recipe: str) -> type | None:
    """Run what ``Args`` needs of a recipe's text, in a module of its own."""
    tree = ast.parse(text, str(file))
    tree.body = _needed(tree.body)
    if not tree.body:
        return None
    name = f"automoe_args_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    module = sys.modules[name] = ModuleType(name)  # where types named by fields are looked up
    # `recipe` is a module's name or a file's: `from .other import X` works as it does in the recipe.
    module.__dict__.update(__file__=str(file), __package__="" if recipe.endswith(".py") else recipe.rpartition(".")[0])
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    exec(compile(tree, str(file), "exec"), module.__dict__)
    return module.__dict__[CLASS]


def _needed(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Those that define ``Args``, and what they name, in the file's order; empty where nothing defines it."""
    defined: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for name in _defines(statement):
            defined.setdefault(name, []).append(statement)
    kept: set[ast.stmt] = set()
    waiting = [CLASS] if CLASS in defined else []
    while waiting:
        for statement in defined.get(waiting.pop(), []):
            if statement not in kept:
                kept.add(statement)
                waiting += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    future = [node for node in statements if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    return [node for node in statements if node in kept or (kept and node in future)]


def _defines(statement: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement binds, an ``if`` or ``try`` with all inside it."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
