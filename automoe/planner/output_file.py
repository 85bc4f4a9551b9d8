"""Writes the files that ``automoe plan`` makes on request: presets and exports."""

from __future__ import annotations

from pathlib import Path

from automoe.errors import ConfigError


def write_out(path: Path, text: str, out: str, content: str, instead: str) -> None:
    """Write ``text`` to ``path`` and make its folders; a file with this text already is no error.

    Args:
        out: the value of ``out=`` on the command line, for the error.
        content: subject of the error's sentence "... cannot be written", such as ``the preset``.
        instead: setting that the error suggests, such as ``out=FILE``.

    Raises:
        ConfigError: the file cannot be written, or exists with another text.
    """
    try:
        # Reading a FIFO would wait for its other end.
        if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
            rule = f"{content} exists with other content"
            raise ConfigError("out", out, rule, f"Remove it, or set {instead}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        rule = f"{content} cannot be written: {error.strerror}"
        raise ConfigError("out", out, rule, f"Set {instead}, where you may write") from error
