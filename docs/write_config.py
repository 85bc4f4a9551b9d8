"""Writes docs/config.md: ``make docs-config``."""

from __future__ import annotations

from pathlib import Path

from automoe.config.reference import args_sections, sections
from automoe.config.shipped import list_recipes

_HEAD = """\
# Configuration

Every key, its type, its default and what it means. An override is `key=value`; `automoe train --help mesh` shows a
section in the terminal, and `--print-config` the values that a run would have. Primaries and groups (`conf/`) hold what
differs from these defaults. This page is made from `automoe/config/schema.py` by `make docs-config`.
"""


def page() -> str:
    """``docs/config.md``."""
    parts = [_HEAD]
    own = [(f"{section} of recipe={name}", *rest) for name in list_recipes() for section, *rest in args_sections(name)]
    for section, document, keys in [*sections(), *own]:
        if not keys:
            continue
        parts.append(f"\n## {section or 'At the top'}\n")
        if document:
            parts.append(f"\n{document}\n")
        parts.append("\n| key | value | default | |\n|---|---|---|---|\n")
        for key in keys:
            default = f"`{key.default}`" if key.default else "empty"
            cells = (f"`{key.name}`", key.kind, default, key.comment)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts).replace("``", "`")


if __name__ == "__main__":
    Path(__file__).with_name("config.md").write_text(page())
