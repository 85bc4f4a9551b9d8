"""Files that ``automoe plan`` writes for its user."""

from __future__ import annotations

from pathlib import Path

from automoe.errors import ConfigError


def write_out(path: Path, text: str, out: str, content: str, instead: str) -> None:
    """Write ``text`` to ``path`` and make its folders; an equal file stays.

    Args:
        out: value that the user gave ``out=``, for the error.
        content: what cannot be written, for the error's sentence, as in ``it``.
        instead: setting that the error suggests, as in ``out=FILE``.

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
