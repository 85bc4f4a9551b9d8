"""Runs ``automoe demo`` and draws what it printed: docs/images/demo.svg, by ``make docs-images``."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from automoe.demo import show_run, show_step

COLUMNS = 100


class Wrapping(Console):
    """A console that wraps every line: what a terminal would wrap, the picture would cut off."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options | {"soft_wrap": False})


def main() -> None:
    console = Wrapping(record=True, width=COLUMNS, highlight=False, color_system="truecolor", force_terminal=False)
    with tempfile.TemporaryDirectory() as folder:
        assert show_step(console) and show_run(console, Path(folder) / "runs")
        text = console.export_svg(title="automoe demo").replace(folder + "/", "")
    # rich names a font on a server; the reader's own monospace does as well.
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.S).replace("Fira Code, ", "")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    Path(__file__).with_name("images").joinpath("demo.svg").write_text(text)


if __name__ == "__main__":
    main()
