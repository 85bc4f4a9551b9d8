"""Pages of one file each: a template that is filled in, with every picture inside. They ask for nothing elsewhere."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from automoe.storage.files import replace_file

MESH_CAPTION = (
    "The same ranks in both views: each keeps its place, and the colours show who works with whom"
)


def render(template: str, **values: Any) -> str:
    """The page that ``template``, a file beside this one, makes of ``values``, all of which are escaped."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent, encoding="utf-8")
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return made.get_template(template).render(values)


def write_page(path: Path, page: str) -> Path:
    """Write ``page`` at once: a browser that reloads never sees half of it."""
    replace_file(path, page)
    return path


def picture(png: bytes, caption: str, wide: bool = False) -> dict[str, Any]:
    """A PNG as the templates take it."""
    # One scale for all pictures, so that their text is of one size: the PNG header's width in CSS pixels.
    width = round(int.from_bytes(png[16:20], "big") / 1.4)
    return {
        "caption": caption,
        "width": width,
        "base64": base64.b64encode(png).decode(),
        "wide": wide,
    }
