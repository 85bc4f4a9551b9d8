"""``automoe verify``: one step on one rank and on the configured mesh, every number compared."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status. The rest of the package is imported when it is called."""
    from automoe.verify.run import main as run

    return run(argv)
