"""The console script ``automoe``: train, plan, verify, export, convert, each imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "train": "train a model, here or on a cluster; -m sweeps",
    "plan": "memory, traffic and batch arithmetic of a configuration, without hardware",
    "verify": "one step on the reference mesh and on the configured one, compared",
    "export": "write a run's weights as a HuggingFace checkpoint",
    "convert": "a HuggingFace checkpoint in another dtype, layout or quantisation",
}


def main(argv: list[str] | None = None) -> int:
    """Hand the rest of the command line to a command's ``main(argv)``; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["completion"]:
        from automoe.completion import bash_completion

        print(bash_completion())
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"error: no command {argv[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    sys.path.insert(0, os.getcwd())  # as `python -m` does: a recipe of one's own is found beside the run
    return importlib.import_module(f"automoe.{argv[0]}").main(argv[1:])


def _usage() -> str:
    lines = [
        f"  {name:<11} {what}"
        for name, what in (COMMANDS | {"completion": "print a bash completion script"}).items()
    ]
    return "\n".join(
        ["automoe COMMAND [options] [key=value ...]", "", *lines, "", "automoe COMMAND --help says more"]
    )


if __name__ == "__main__":
    sys.exit(main())
