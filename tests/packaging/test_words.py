"""Names and docstrings say what they hold: rules that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sources import MODULES, ROOT, tree_of

FILLERS = {"one", "found", "own", "kept", "what", "given"}


def filler_names(tree: ast.AST) -> list[str]:
    """Variables, parameters and functions that are named by a word which says nothing of what they hold; fields of
    classes are left out."""
    fields = {id(node.target) for cls in ast.walk(tree) if isinstance(cls, ast.ClassDef) for node in cls.body
              if isinstance(node, ast.AnnAssign)}  # fmt: skip
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names = [(node.lineno, node.id) for node in stored if id(node) not in fields]
    names += [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    return [f"{line}: {name}" for line, name in sorted(names) if name in FILLERS]


def test_variables_are_named_after_what_they_hold() -> None:
    found = {str(path.relative_to(ROOT)): filler_names(tree_of(path)) for path in MODULES.values()}
    found.pop("automoe/comm/tokens.py")  # ``MicroBatch.given``, which losses of plugins read
    assert {path: names for path, names in found.items() if names} == {}
    assert filler_names(ast.parse("def f(what):\n    for one in what:\n        kept = one.found")) == [
        "1: what", "2: one", "3: kept",
    ]  # fmt: skip


def documented_arguments(tree: ast.AST) -> Iterator[str]:
    """Names under ``Args`` of a docstring that the function, or the class's constructor, does not take."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        args = re.search(r"^Args:\n((?:    .*\n?|\n)*)", ast.get_docstring(node) or "", re.M)
        made = [node, *(n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n.name == "__init__")]
        function = next((n for n in made if isinstance(n, ast.FunctionDef)), None)
        if args is None or function is None:
            continue
        taken = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
        named = (
            ", ".join(re.findall(r"^    ((?:\*{0,2}\w+, )*\*{0,2}\w+):", args[1], re.M)).replace("*", "").split(", ")
        )
        yield from (f"{node.name}: {name}" for name in named if name and name not in taken)


def test_documented_arguments_exist() -> None:
    found = {str(path.relative_to(ROOT)): [*documented_arguments(tree_of(path))] for path in MODULES.values()}
    assert {path: names for path, names in found.items() if names} == {}
    wrong = ast.parse('def f(x):\n    """Do.\n\n    Args:\n        x: there.\n        y: not there.\n    """')
    assert [*documented_arguments(wrong)] == ["f: y"]
