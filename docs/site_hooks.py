"""Hooks of MkDocs: formulas become MathML while the site is built, so that a page needs no script and no network."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves of $...$ and $$...$$ with ``generic: true``.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_page_content(content: str, **_: object) -> str:
    def rendered(match: re.Match[str]) -> str:
        if match[2] == "(":
            return convert(html.unescape(match[3]))
        formula = convert(html.unescape(match[3]), display="block")
        return f'<div style="overflow-x: auto">{formula}</div>'  # wider than a phone

    return FORMULA.sub(rendered, content)
