"""``automoe verify``: compare a step on the configured mesh with the same step on one rank."""

from __future__ import annotations

import importlib

from automoe.errors import exit_status


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Verify the configuration that ``argv`` (None: ``sys.argv``) names; return the exit status.

    It is 0 if a step on the mesh equals the step on one rank, 1 if it differs, 2 if the
    configuration is wrong or cannot run here, 3 if a rank failed.
    The implementation is imported only when this function is called.
    """
    return importlib.import_module("automoe.verify.run").main(argv)
