"""``automoe verify``: one step on one rank and on the configured mesh, every number compared."""

from __future__ import annotations

import importlib

from automoe.errors import exit_status


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status. The rest of the package is imported when it is called."""
    return exit_status(lambda: importlib.import_module("automoe.verify.run").main(argv))
