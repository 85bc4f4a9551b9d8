"""Paths in the configuration: expand ``~`` and glob patterns, refuse impossible paths."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Annotated

from automoe.errors import ConfigError

# Type of a configuration value that may be a path; ``checked_path`` checks it.
PathText = Annotated[str, "path"]
MAX_NAME_BYTES = 255  # of one name in a path, on Linux's file systems
MAX_PATH_BYTES = 4095


def checked_path(key: str, text: str) -> str:
    """Return ``text`` unchanged if it can be a path.

    Args:
        key: config key that has this value, for the error.

    Raises:
        ConfigError: ``~USER`` has no home directory, the path or a name in it is too long, or it
            contains a zero byte.
    """
    names = text.encode(errors="surrogateescape").split(b"/")
    rule = ""
    if text.startswith("~") and os.path.expanduser(text) == text:
        rule = f"{text.partition('/')[0]} has no home directory here"
    elif max(map(len, names)) > MAX_NAME_BYTES or len(b"/".join(names)) > MAX_PATH_BYTES:
        rule = f"a name has at most {MAX_NAME_BYTES} bytes, and a path {MAX_PATH_BYTES}"
    elif "\0" in text:
        rule = "a path cannot contain a zero byte"
    if rule:
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise ConfigError(key, shown, rule, "Name another path; write ./ before an odd name")
    return text


def user_path(key: str, text: str | Path) -> Path:
    """Return the path ``text``, the value of config key ``key``, with ``~`` expanded.

    Raises ``ConfigError`` if it cannot be a path.
    """
    return Path(checked_path(key, str(text))).expanduser()


def matches(text: str) -> list[str]:
    """Return the paths that match ``text``: itself if it exists, else those that fit it as a glob.

    ``~`` is expanded. Existing folders at the start of ``text`` are taken literally, even with
    brackets in their names.

    Raises:
        PermissionError: a folder in ``text`` cannot be read, in which a glob would just find
            nothing.
    """
    path = os.path.expanduser(text)
    folder = path
    while folder and not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if os.path.isdir(folder):
        os.scandir(folder).close()
    return glob.glob(glob.escape(folder) + path[len(folder) :], recursive=True)
