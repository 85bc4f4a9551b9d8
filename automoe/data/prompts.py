"""Tokenised prompts that a run answers while it trains (``observe.samples``).

Importing this module does not load torch.
"""

from __future__ import annotations

from pathlib import Path

from automoe.config.data_schema import NO_TOKENIZER
from automoe.config.schema import Config
from automoe.data.chat_template import chat_template_of
from automoe.data.tokenizer import Tokenizer
from automoe.errors import ConfigError
from automoe.storage.files import read_file
from automoe.storage.guarded import guarded

KEY = "observe.samples"


def encoded_prompts(config: Config, tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """Return the prompts of ``observe.samples`` as texts and as token ids.

    If the run trains on conversations, each prompt is rendered as a user's message by the chat
    template.

    Raises:
        ConfigError: the file of prompts cannot be read, a prompt does not fit into a row with its
            answer, or the data has no tokenizer.
        DataError: the chat template refuses a prompt, or encoding takes too long.
    """
    texts = _texts(config.observe.samples)
    chat = chat_template_of(config)
    if texts and tokenizer.digest == NO_TOKENIZER:
        rule = "they are text, and data.kind=benchmark trains on ids that stand for no text"
        raise ConfigError(KEY, texts[0], rule, "Leave it out")
    row = config.train.seq_len
    answer = config.observe.sample_tokens
    if texts and answer >= row:
        rule = f"a prompt and its answer share a row of train.seq_len={row} tokens, so an answer must be shorter"
        raise ConfigError("observe.sample_tokens", answer, rule, f"Set at most {row - 1}")

    def encoded() -> list[list[int]]:
        if chat is None:
            return [tokenizer.encode(text).tolist() for text in texts]
        return [chat.prompt([{"role": "user", "content": text}]) for text in texts]

    ids = guarded(f"{KEY}: tokenizer", encoded) if texts else []
    for text, prompt in zip(texts, ids, strict=True):
        if not 0 < len(prompt) <= row - answer:
            rule = f"it has {len(prompt)} tokens, not 1 to train.seq_len - observe.sample_tokens = {row - answer}"
            raise ConfigError(KEY, text, rule, "Shorten it, or lower observe.sample_tokens")
    return texts, ids


def _texts(prompts: list[str] | str) -> list[str]:
    """Return ``prompts``, or the lines that are not blank if it is the path of a text file.

    Raises:
        ConfigError: the file cannot be read, or all its lines are blank.
    """
    if not isinstance(prompts, str) or not prompts:
        return list(prompts)
    try:
        lines = (
            read_file(Path(prompts).expanduser())
            .decode("utf-8-sig")
            .replace("\r", "\n")
            .split("\n")
        )
        if texts := [line for line in lines if line.strip()]:
            return texts
        raise ValueError("no line has text")
    except (OSError, ValueError) as error:
        raise ConfigError(
            KEY,
            prompts,
            f"a list of prompts, or a text file with one on each line; it cannot be read ({error})",
            "Write '[What is 2+2?]'",
        ) from None
