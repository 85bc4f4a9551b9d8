"""How much there is to read: lines, columns, tokens and characters of files, functions and rooms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import CORE, ROOT, SOURCES, tree_of

MAX_TOKENS = 373_585
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_COLUMNS = 499, 80, 125


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, without signature and docstring."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            yield node.name, node.end_lineno - node.body[documented].lineno + 1


def test_files_functions_and_lines_stay_short() -> None:
    too_long = []
    for path in SOURCES:
        lines, name = path.read_text().splitlines(), path.relative_to(ROOT)
        if len(lines) > MAX_FILE_LINES:
            too_long.append(f"{name}: {len(lines)} lines")
        too_long += [f"{name}: {each} has {n} lines" for each, n in functions(path) if n > MAX_FUNCTION_LINES]
        too_long += [f"{name}:{i}: {len(line)} columns" for i, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
    assert not too_long, "\n".join(too_long)


LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENCODING, tokenize.ENDMARKER}
# From Python 3.12 on an f-string is many tokens, between these two; before, and here, it is one.
FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))


def count_tokens(source: str) -> int:
    """Python tokens of a source without comments, line ends and indents, an f-string counted as one."""
    total = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += (token.type == FSTRING_START) - (token.type == FSTRING_END)
        total += depth == 0 and token.type not in LAYOUT
    return total


def size_of(path: Path) -> tuple[int, int]:
    """Tokens and characters of a file: the same on every Python. Expressions inside f-strings count, layout and prose
    are free among the tokens and not among the characters."""
    fields = (node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.FormattedValue))
    source = path.read_text()
    return count_tokens(source) + sum(count_tokens(ast.unparse(field)) for field in fields), len(source)


def test_every_room_keeps_to_its_share_of_tokens_and_characters() -> None:
    rows = re.findall(r"^\| (.*) \| ([\d,]+) \| ([\d,]+) \|$", (ROOT / "docs/architecture.md").read_text(), re.M)
    shares = {
        room.split("`")[1].rstrip("/"): tuple(int(number.replace(",", "")) for number in numbers)
        for room, *numbers in rows
        if "`" in room
    }
    shares["automoe"] = shares.pop("automoe/train.py")  # files at the top
    used: dict[str, tuple[int, int]] = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).parts
        room = parts[1] if parts[0] == "automoe" and len(parts) > 2 else parts[0]
        tokens, characters = used.get(room, (0, 0))
        more = size_of(path)
        used[room] = (tokens + more[0], characters + more[1])
    assert used.keys() == shares.keys()
    over = [(room, n, shares[room]) for room, n in used.items() if n[0] > shares[room][0] or n[1] > shares[room][1]]
    assert not over, "\n".join(f"{room}: {n} of {share} tokens and characters" for room, n, share in over)
    assert sum(tokens for tokens, _ in shares.values()) <= MAX_TOKENS
    for name, rooms in (("reading core", CORE), ("total", shares)):
        [stated] = [numbers for room, *numbers in rows if room.startswith(name)]
        sums = zip(*(shares[room] for room in rooms), strict=True)
        assert tuple(int(number.replace(",", "")) for number in stated) == tuple(map(sum, sums)), name


@pytest.mark.parametrize(
    ("source", "tokens"),
    [("x = 1", 3), ('f"{x}"', 2), ('f"a {x + 1:>{width}} b"', 5), ("f'{d[0]!r}' 'more'", 6), ('rf"""\n{x}\n"""', 2)],
)
def test_strings_are_taken_apart_alike_on_every_python(source: str, tokens: int, tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text(source)
    assert size_of(path) == (tokens, len(source))


def test_code_is_not_packed() -> None:
    """Of 1,000 lines at most 30 are longer than 100 columns, and no conditional expression stands in another."""
    lines = [line for path in SOURCES for line in path.read_text().splitlines() if line.strip()]
    assert sum(len(line) > 100 for line in lines) <= 0.03 * len(lines)
    nested = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.IfExp) and sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1
    ]
    assert not nested
