"""Turns of a conversation: the answers to train, and the samples that their tokens make."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from automoe.data.chat import WANTED, Message


@dataclass(frozen=True)
class Sample:
    """Sequence of tokens, with the spans [start, end) of its trained answers."""

    ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Turn:
    """Tokens up to the end of one answer, stop token included.

    Attributes:
        start: index of the first token that the model generates.
    """

    ids: list[int]
    start: int


def is_wanted(message: Message) -> bool:
    """Return False if a message is left out of training.

    OpenAI's files mark such a message by ``weight: 0``, axolotl's by ``train: false``.
    """
    return all(message.get(key, 1) != 0 for key in WANTED)


def is_empty(answer: Message) -> bool:
    """Return True if an answer has nothing to train but a stop token."""
    return not any(
        str(answer.get(key) or "").strip()
        for key in ("content", "tool_calls", "reasoning_content", "thinking")
    )


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, or of two lists of ids."""
    return len(os.path.commonprefix([one, other]))


def end_of_prompt(head: str, before: str) -> int:
    """Return where the generation prompt ends in ``head``, the text before an answer.

    Args:
        before: text that ends in the generation prompt; up to 15 more characters may follow the
            prompt in ``head``.
    """
    ends = range(len(head), max(0, len(head) - 16), -1)
    return max(ends, key=lambda end: num_shared(head[:end][::-1], before[::-1]), default=0)


def joined(turns: list[Turn]) -> Iterator[Sample]:
    """Yield the samples of one conversation's turns.

    Turns share a sample as long as each begins with all tokens of the one before it.
    """
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
    """Return a tool call with its arguments as JSON text, or as an object."""
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except (ValueError, RecursionError):  # Arguments that are no JSON stay text.
            pass
    return {"type": "function"} | call | {"function": function} if "function" in call else function
