"""Conversations tokenised into the cache: samples with a mark on each token that is trained."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from automoe.data.chat import Conversation, num_bytes
from automoe.data.chat_template import ChatTemplate, Sample
from automoe.errors import DataError

_BATCH = 256  # conversations rendered and tokenised at a time


def tokenise_chat(
    folder: Path,
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    vocab_size: int,
    pairs: bool = False,
) -> dict[str, Any]:
    """Write tokens, marks and the table of samples as ``prepare`` reads them; returns the facts of
    the corpus.

    All samples of a conversation have its hash, so that none of it is validated on while the rest
    is trained; so have pairs with the same prompt. The two sequences of a pair follow one another
    as one sample, and the table of pairs has the length of the first as its fifth column.

    Args:
        pairs: of two conversations each, one after the other.

    Raises:
        DataError: as ``read_conversations`` and ``ChatTemplate.samples``, or an answer of a pair
            that is no single one.
    """
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    digest = hashlib.blake2b(digest_size=16)
    table = array("Q")
    counts = Counter[str]()
    template.counts.clear()
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as marks:
        batched = _batched(conversations, template)
        for conversation, samples, first in (
            _paired(batched, counts) if pairs else ((*one, 0) for one in batched)
        ):
            hashed = conversation.messages[: conversation.prompt or None]
            raw = json.dumps([hashed, conversation.tools], sort_keys=True, default=str).encode()
            text_hash = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
            counts["conversations"] += 1
            counts["text_bytes"] += sum(map(num_bytes, conversation.messages))
            counts["rendered_tokens"] += len(samples[-1].ids)
            for sample in samples:
                trained = np.zeros(len(sample.ids), dtype=np.bool_)
                for start, end in sample.spans:
                    trained[start:end] = True
                for file, values in (
                    (tokens, np.array(sample.ids).astype(dtype)),
                    (marks, trained),
                ):
                    digest.update(values.tobytes())
                    file.write(values.tobytes())
                row = len(sample.ids), text_hash, conversation.file, conversation.line
                table.extend((*row, first) if pairs else row)
                counts["trained_tokens"] += int(trained.sum())
    columns = np.frombuffer(table, dtype=np.uint64).reshape(-1, 5 if pairs else 4).T.copy()
    digest.update(columns[0].tobytes())
    digest.update(columns[4:].tobytes())
    np.save(folder / "documents.npy", columns)
    text_bytes = counts.pop("text_bytes")
    facts = {"dtype": dtype.name, "content": digest.hexdigest(), "text_bytes": text_bytes}
    return facts | {"chat": dict(counts + template.counts)}


def _batched(
    conversations: Iterable[Conversation], template: ChatTemplate
) -> Iterator[tuple[Conversation, list[Sample]]]:
    waiting = iter(conversations)
    while batch := list(islice(waiting, _BATCH)):
        yield from zip(batch, template.samples(batch), strict=True)


def _paired(
    batched: Iterator[tuple[Conversation, list[Sample]]], counts: Counter[str]
) -> Iterator[tuple[Conversation, list[Sample], int]]:
    """Both conversations of a pair as one, their samples one after the other, and the first one's
    length."""
    for chosen, rejected in zip(batched, batched, strict=True):
        conversation = chosen[0]
        if several := max(len(samples) for _, samples in (chosen, rejected)) - 1:
            raise DataError(
                f"{conversation.where}: an answer of several messages, which the chat template shows as {several + 1} "
                "sequences, each rewriting the one before. Put all but the last message of the answer into the prompt."
            )
        [one], [other] = chosen[1], rejected[1]
        counts["pairs"] += 1
        counts["equal"] += one.ids == other.ids
        first = len(one.ids)
        joined = Sample(
            one.ids + other.ids, one.spans + [(a + first, b + first) for a, b in other.spans]
        )
        both = conversation.messages + rejected[0].messages[conversation.prompt :]
        yield replace(conversation, messages=both), [joined], first


def describe_chat(counts: dict[str, int], tokens: int, samples: int) -> Iterator[str]:
    """What became of the conversations, a line each, for the user.

    Args:
        counts: of ``tokenise_chat``.
        tokens, samples: of the whole corpus.
    """
    answers = counts["answers"]
    conversations = counts["conversations"]
    share = counts["trained_tokens"] / max(tokens, 1)
    if pairs := counts.get("pairs", 0):
        yield f"{pairs:,} pairs of answers: {tokens:,} tokens, {share:.0%} of them in answers"
        if equal := counts.get("equal"):
            yield f"warning: both answers are the same in {equal:,} of {pairs:,} pairs, which teach nothing"
    else:
        yield f"{conversations:,} conversations, {answers:,} answers: {tokens:,} tokens, {share:.0%} of them trained"
    if samples > conversations:
        why = (
            "the chat template rewrites"
            if not counts.get("apart")
            else "the chat template, or the tokenizer, rewrites"
        )
        factor = tokens / max(counts["rendered_tokens"], 1)
        yield (
            f"{why} earlier turns, so {conversations:,} conversations are {samples:,} samples "
            f"with {factor:.2f} times the tokens (data.chat.turns=last: the last answer alone)"
        )
    told = {
        "apart": "begin with characters that the tokenizer would join with the prompt, and are tokenised apart from it",
        "prompt_cut": "are written without the end of the generation prompt, which a model is given at inference",
        "eos_added": "end in the end-of-text token, since the chat template ends them in no special token",
    }
    for key, what in told.items():
        if counts.get(key):
            yield f"{counts[key]:,} answers {what}"
    if empty := counts.get("empty"):
        yield f"warning: {empty:,} answers are empty, and teach to say nothing (weight: 0 in a message leaves it out)"
    if counts.get("tools_unseen"):
        yield f"warning: the chat template shows no tools, and {counts['tools_unseen']:,} conversations have some"
    if counts.get("unseen"):
        yield f"warning: the chat template leaves out {counts['unseen']:,} questions or system prompts"
