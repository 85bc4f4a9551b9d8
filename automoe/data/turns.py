"""Turns of a conversation: which answers are trained, and how their tokens join to samples."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from automoe.data.chat import WANTED, Message


@dataclass(frozen=True)
class Sample:
    """One sequence of tokens, and the [start, end) of each answer in it that is trained."""

    ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Turn:
    """Everything up to the end of one answer, stop token included; ``start`` is its first generated
    token."""

    ids: list[int]
    start: int


def is_wanted(message: Message) -> bool:
    """Whether an answer is trained: not with ``weight: 0`` (OpenAI's files) or ``train: false``
    (axolotl's)."""
    return all(message.get(key, 1) != 0 for key in WANTED)


def in_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def is_empty(answer: Message) -> bool:
    """Whether nothing but a stop token would be trained."""
    return not any(
        str(answer.get(key) or "").strip()
        for key in ("content", "tool_calls", "reasoning_content", "thinking")
    )


def end_of_prompt(head: str, before: str) -> int:
    """Where in ``head``, all that stands before an answer's text, ends what ends ``before``: blanks
    may follow it."""
    ends = range(len(head), max(0, len(head) - 16), -1)
    return max(
        ends, key=lambda end: len(os.path.commonprefix([head[:end][::-1], before[::-1]])), default=0
    )


def joined(turns: list[Turn]) -> Iterator[Sample]:
    """Turns of one conversation, those together that one sequence of tokens shows as each was
    generated."""
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for turn in turns:
        if spans and turn.ids[: len(ids)] != ids:
            yield Sample(ids, spans)
            spans = []
        ids = turn.ids
        spans.append((turn.start, len(ids)))
    yield Sample(ids, spans)


def as_tool_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """A tool call with its arguments as text, or as an object."""
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:  # no JSON: as it is
            pass
    return {"type": "function"} | call | {"function": function} if "function" in call else function
