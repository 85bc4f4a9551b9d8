"""Reads ``observe.profile_steps``: ``"10-12"`` is steps 10, 11 and 12, ``"10"`` one step, ``""`` none."""

from __future__ import annotations

import re

from automoe.errors import ConfigError


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """First and last step to profile; None when ``text`` is empty.

    Raises:
        ConfigError: not ``first-last`` with 1 <= first <= last.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            "observe.profile_steps",
            text,
            "a window is first-last with 1 <= first <= last",
            'For example "10-12"',
        )
    return first, last
