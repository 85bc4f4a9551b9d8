"""Files that ``automoe plan`` writes for its user."""

from __future__ import annotations

from pathlib import Path

from automoe.errors import ConfigError


def write_out(path: Path, text: str, out: str, what: str, remedy: str) -> None:
    """Write ``text`` to ``path`` and make its folders.

    Args:
        out: value of ``out=`` for the message.
        what: start of the message's sentence, as in ``it cannot be written``.
        remedy: what the user can do.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        rule = f"{what} cannot be written: {error.strerror}"
        raise ConfigError("out", out, rule, remedy) from error
