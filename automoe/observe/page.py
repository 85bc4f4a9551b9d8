"""Single-file HTML pages: a filled-in template with embedded pictures and no external requests."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

MESH_CAPTION = (
    "The same ranks in both views: each keeps its place, and the colours show who works with whom"
)


def render(template: str, **values: Any) -> str:
    """Return the HTML of a Jinja template, filled in with escaped ``values``.

    Args:
        template: name of a file in the folder of this module.
        values: the template's variables.
    """
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent, encoding="utf-8")
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return made.get_template(template).render(values)


def picture(png: bytes, caption: str, wide: bool = False) -> dict[str, Any]:
    """Return the variables with which the HTML templates show a PNG.

    Args:
        png: content of the PNG file.
        wide: True for a picture as wide as the page.

    Returns:
        ``caption``, CSS ``width`` in pixels, ``base64`` of the PNG, and ``wide``.
    """
    # CSS width from the PNG header: equally scaled pictures have text of equal size.
    width = round(int.from_bytes(png[16:20], "big") / 1.4)
    return {
        "caption": caption,
        "width": width,
        "base64": base64.b64encode(png).decode(),
        "wide": wide,
    }
