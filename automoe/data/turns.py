"""Training sequences of a conversation: token ids, and where each trained answer begins and ends.

Answers share a sequence as long as the template keeps earlier text the same when messages follow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from automoe.data.chat import WANTED, Message

TEXTS = ("content", "reasoning_content", "reasoning", "thinking")  # keys of an answer's texts


@dataclass(frozen=True)
class Sample:
    """Token ids of a conversation; ``spans`` are the ranges [start, end) of ``ids`` that are trained answers."""

    ids: list[int]
    spans: list[tuple[int, int]]


# Token ids up to the end of one answer, its stop token included; index of the first one that the
# model generates.
Turn = tuple[list[int], int]


def is_wanted(message: Message) -> bool:
    """Return True if an assistant message is to be trained.

    OpenAI's files exclude a message by ``weight: 0``, axolotl's by ``train: false``.
    """
    return all(message.get(key, 1) != 0 for key in WANTED)


def num_left_out(texts: Iterable[str], written: str) -> int:
    """Return how many of ``texts`` are not in ``written``, ignoring case and outer blanks."""
    return sum(text.strip().casefold() not in written.casefold() for text in texts)


def num_shared(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, or of two lists of ids."""
    return len(os.path.commonprefix([first, other]))


def begin_of_answer(head: str, before: str, plain: str, shared: int) -> tuple[int, int]:
    """Return (begin, end): where to join an answer to the prompt that the model sees at inference.

    The training text is ``before[:end]``, followed by the text through the answer from index
    ``begin`` on. The two indices differ, because a template may write earlier messages, or the
    text between messages, differently once the answer follows, and may leave out the end of its
    generation prompt.

    Args:
        head: rendered text of the conversation with the answer, cut off where the answer's own
            text begins.
        before: rendered text of the messages before the answer, with the generation prompt.
        plain: ``before`` without the generation prompt.
        shared: length of the common prefix of ``before`` and the text through the answer.
    """
    begun = num_shared(plain, before)
    prompt = before[begun:]
    moved = shared < len(plain.rstrip())
    least = 0 if moved else max(0, shared - len(prompt))
    for size in range(len(prompt), max(0, len(prompt.strip()) // 2 - 1, shared - begun), -1):
        at = head.rfind(prompt[:size], least)
        if at >= 0:
            return at + size, begun + size
    if not moved:
        return min(shared, len(head)), min(shared, len(head))
    # Up to 15 characters may stand between the prompt and the answer's own text.
    ends = range(len(head), max(0, len(head) - 16), -1)
    end = max(ends, key=lambda end: num_shared(head[:end][::-1], before[::-1]), default=0)
    return end, len(before)


def joined(turns: list[Turn]) -> Iterator[Sample]:
    """Yield the token sequences of one conversation, each with its trained answers.

    Args:
        turns: for each answer in order, the ids of the conversation up to the answer's end, and the
            index of the answer's first id. Answers share a sequence as long as the ids of one begin
            with all ids of the answer before it.
    """
    ids = []
    spans = []
    for turn, start in turns:
        if spans and turn[: len(ids)] != ids:
            yield Sample(ids, spans)
            spans = []
        ids = turn
        spans.append((start, len(ids)))
    yield Sample(ids, spans)


def as_tool_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text (``as_text``), or as an object.

    Args:
        call: {name, arguments}, or an object with these under ``function``.
    """
    function = {"arguments": {}} | call.get("function", call)
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        function["arguments"] = json.loads(arguments)
    return {"type": "function"} | call | {"function": function} if "function" in call else function
