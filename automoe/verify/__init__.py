"""``automoe verify``: one step on one rank and on the configured mesh, every number compared."""

from __future__ import annotations

import importlib

from automoe.errors import exit_status


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Verify the configuration that ``argv`` names; returns the exit status. Imports the package
    when it is called."""
    return importlib.import_module("automoe.verify.run").main(argv)
