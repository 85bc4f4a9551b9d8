"""Tokenisation of conversations into the files of a corpus: token ids and loss masks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from automoe.data.chat import Conversation, num_bytes
from automoe.data.chat_template import ChatTemplate
from automoe.data.tokenise import CorpusWriter
from automoe.data.turns import Sample
from automoe.errors import AutomoeError, DataError
from automoe.storage.guarded import doing

_BATCH = 256  # conversations rendered and tokenised together
# What the user reads of ``ChatTemplate.counts``.
_REMARKS = {
    "prompt_cut": "{n:,} answers are written without the end of the generation prompt, which a model is given at "
    "inference",
    "eos_added": "{n:,} answers end in the end-of-text token, since the chat template ends them without a special "
    "token",
    "empty": "warning: {n:,} answers are empty, and teach to say nothing (weight: 0 in a message leaves it out), "
    "first {first}",
    "left_out": "warning: the chat template leaves out {n:,} texts, tools or arguments of conversations, first "
    "{first}: reasoning, or what it cuts. data.chat.template=FILE names a template that writes them",
    "no_reasoning": "warning: the generation prompt opens reasoning, and {n:,} of {answers:,} answers have none, "
    "first {first}: a model does not learn to reason here. Give answers their reasoning_content, or turn reasoning "
    "off by the template's argument, for all conversations (data.chat.template_args={{enable_thinking: false}}) or "
    "in those without (chat_template_kwargs)",
}


def tokenise_chat(
    folder: Path,
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    vocab_size: int,
    pairs: bool = False,
) -> dict[str, Any]:
    """Write token ids, loss masks and a table of sequences to ``folder``; return a summary.

    The files are ``tokens.bin``, ``trained.bin`` and ``documents.npy``. A conversation becomes one
    or several token sequences (samples), and the table has a row for each. The row has the hash of
    the conversation, so that all its samples are in the same split; preference pairs with the same
    prompt share a hash too. The two sequences of a preference pair are stored one after the other
    as one sample, and the fifth column of the table has the length of the first sequence.

    Args:
        template: converts conversations to tokens; its counts are cleared first.
        vocab_size: largest token id + 1, which decides on the type of a token in its file.
        pairs: True if ``conversations`` are preference pairs, the two of each pair one after the
            other.

    Returns:
        The dictionary of ``CorpusWriter.save`` (type of a token, digest of the content, bytes of
        text), and ``chat``: counts that ``describe_chat`` prints.

    Raises:
        DataError: a record is malformed, the chat template refuses it, or an answer of a pair takes
            more than one sequence.
    """
    writer = CorpusWriter(vocab_size, 5 if pairs else 4)
    counts = Counter[str]()
    refused = None
    try:
        template.stop_id()
    except AutomoeError as error:  # Only a run that exports needs the stop token.
        refused = str(error)
    template.counts.clear()
    template.first.clear()
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as marks:
        batched = _batched(conversations, template)
        for conversation, samples, first in (
            _paired(batched, counts) if pairs else ((*turns, []) for turns in batched)
        ):
            hashed = conversation.messages[: conversation.prompt or None]
            raw = json.dumps([hashed, conversation.tools], sort_keys=True, default=str).encode()
            text_hash = hashlib.blake2b(raw, digest_size=8)
            counts["conversations"] += 1
            writer.text_bytes += sum(map(num_bytes, conversation.messages))
            counts["rendered_tokens"] += len(samples[-1].ids)
            for sample in samples:
                trained = np.zeros(len(sample.ids), dtype=np.bool_)
                for start, end in sample.spans:
                    trained[start:end] = True
                writer.write(tokens, np.array(sample.ids).astype(writer.dtype))
                writer.write(marks, trained)
                writer.end(len(trained), text_hash, conversation.file, conversation.line, *first)
                counts["trained_tokens"] += int(trained.sum())
    chat = dict(counts + template.counts) | {"first": template.first, "refused": refused}
    return writer.save(folder) | {"chat": chat}


def _batched(
    conversations: Iterable[Conversation], template: ChatTemplate
) -> Iterator[tuple[Conversation, list[Sample]]]:
    waiting = iter(conversations)
    while batch := list(islice(waiting, _BATCH)):
        samples = template.samples(batch)
        doing(f"{batch[-1].path}: reading")
        yield from zip(batch, samples, strict=True)


def _paired(
    batched: Iterator[tuple[Conversation, list[Sample]]], counts: Counter[str]
) -> Iterator[tuple[Conversation, list[Sample], list[int]]]:
    """Yield (conversation, [sample], [length of the first sequence]) for each preference pair.

    The sample is the preferred sequence followed by the rejected one. The conversation has the
    messages of the prompt, of the preferred answer and of the rejected one.

    Args:
        batched: (conversation, its sequences); the two conversations of a pair follow each other.
        counts: ``counts["pairs"]`` grows by 1 per pair, ``counts["equal"]`` if both answers are
            equal.

    Raises:
        DataError: a conversation has more than one sequence.
    """
    for (conversation, chosen), (other, rejected) in zip(batched, batched, strict=True):
        if several := max(len(chosen), len(rejected)) - 1:
            raise DataError(
                f"{conversation.where}: an answer of several messages, which the chat template "
                f"shows as {several + 1} sequences, each rewriting the one before. Put all but the "
                "last message of the answer into the prompt."
            )
        [good] = chosen
        [bad] = rejected
        counts["pairs"] += 1
        counts["equal"] += good.ids == bad.ids
        first = len(good.ids)
        spans = [(start + first, end + first) for start, end in bad.spans]
        both = conversation.messages + other.messages[conversation.prompt :]
        joined = Sample(good.ids + bad.ids, good.spans + spans)
        yield replace(conversation, messages=both), [joined], [first]


def describe_chat(
    chat: dict[str, Any], tokens: int, samples: int, where: Callable[[int, int], str]
) -> Iterator[str]:
    """Yield lines for the user about the tokenised conversations: sizes, remarks, warnings.

    Args:
        chat: ``chat`` of the dictionary that ``tokenise_chat`` returns.
        tokens, samples: numbers of tokens and of token sequences in the whole corpus.
        where: function of a file's index and a line that returns ``file:line``.
    """
    count = Counter(chat)
    conversations = count["conversations"]
    answers = count["answers"]
    share = count["trained_tokens"] / max(tokens, 1)
    if pairs := count["pairs"]:
        yield f"{pairs:,} pairs of answers: {tokens:,} tokens, {share:.0%} of them in answers"
        if equal := count["equal"]:
            yield f"warning: both answers are the same in {equal:,} of {pairs:,} pairs, which teach nothing"
    else:
        yield f"{conversations:,} conversations, {answers:,} answers: {tokens:,} tokens, {share:.0%} of them trained"
    if samples > conversations:
        factor = tokens / max(count["rendered_tokens"], 1)
        yield (
            f"the chat template, or the tokenizer, rewrites earlier turns, so {conversations:,} conversations "
            f"are {samples:,} samples with {factor:.2f} times the tokens (data.chat.turns=last: only the last answer)"
        )
    for key, remark in _REMARKS.items():
        if number := count[key]:
            first = where(*chat["first"].get(key, (0, 0)))
            yield remark.format(n=number, answers=answers, first=first)
