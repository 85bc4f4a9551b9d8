"""Section ``data`` of the configuration: sources of text and conversations, and how they are read.

This module imports neither torch nor Hydra.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from automoe.config.paths import PathText

# What the trainer itself gives to a chat template, or decides about its text.
TEMPLATE_NAMES = frozenset(
    "messages conversations tools chat_template add_generation_prompt continue_final_message "
    "return_assistant_tokens_mask".split()
)


class Shown:
    """Base of settings that error messages print as in YAML, e.g. ``{path: a.jsonl, weight: 2.0}``.

    Fields that are None are left out.
    """

    def __repr__(self) -> str:
        settings = {key: value for key, value in vars(self).items() if value is not None}
        return "{" + ", ".join(f"{key}: {value}" for key, value in settings.items()) + "}"


@dataclass(repr=False)
class SourceConfig(Shown):
    """One of several sources of rows, mixed in proportion to ``weight``; metrics show its ``name``.

    A null ``name`` is that of the file or folder ``path``. Other null fields take the value of the
    same key of ``data`` (``format``, ``keys`` and ``roles``: of ``data.chat``), but ``path`` does
    not.
    """

    path: PathText | None = None  # as data.path
    # name of the source in metrics; null: name of the file or directory without its extension
    name: str | None = None
    weight: float = 1.0  # share of the rows, relative to the sum of all weights
    kind: str | None = None  # as data.kind
    text_key: str | None = None  # as data.text_key
    subset: str | None = None  # as data.subset
    split: str | None = None  # as data.split
    format: Literal["messages", "sharegpt", "alpaca"] | None = None  # as data.chat.format
    keys: dict[str, str] | None = None  # as data.chat.keys
    roles: dict[str, str] | None = None  # as data.chat.roles


@dataclass
class ChatConfig:
    """How conversations are read, rendered by a chat template and trained (``docs/finetune.md``).

    ``keys`` maps the format's names of keys to the records' own (``{role: speaker}``), ``roles``
    the records' names of roles to their meaning (``{bot: assistant}``). ``template`` is a Jinja
    file (null: the tokenizer's), ``template_args`` are its arguments besides the messages, ``date``
    is the date that it writes. ``turns`` says which answers are trained, ``special_text`` whether
    special tokens spelled out in messages become tokens, and ``pack`` lets several samples share a
    row.
    """

    # keys of a record. messages: messages with role and content; sharegpt: conversations with from
    # and value; alpaca: instruction, input and output
    format: Literal["messages", "sharegpt", "alpaca"] = "messages"
    # keys of the records that differ from the format's, such as {messages: dialogue, role: speaker,
    # content: text, prompt: question}
    keys: dict[str, str] | None = None
    roles: dict[str, str] | None = None  # meaning of other role names, such as {bot: assistant}
    # file with a Jinja chat template; plain: lines of "user: ..." and "assistant: ..."; null: the
    # tokenizer's own template
    template: PathText | None = None
    # arguments of the template besides messages, such as {enable_thinking: false}
    template_args: dict[str, str | bool | int | float] | None = None
    # date that the template writes, if it writes one, such as 2026-11-23; null: first day of the run
    date: str | None = None
    turns: Literal["all", "last"] = "all"  # train all answers of a conversation, or only the last
    # special tokens that messages spell out (<|im_end|>): token: they become those tokens, as
    # apply_chat_template does; text: they stay text
    special_text: Literal["token", "text"] = "token"
    # true: several samples share a row, and each attends only to itself; false: one sample per row
    pack: bool = True


PREFERENCE_KINDS = ("preference", "stdlib_preference")
CHAT_KINDS = ("chat", "stdlib_chat", *PREFERENCE_KINDS)
IGNORE = -100  # label of a position that is not trained
NO_TOKENIZER = "none"  # name of the tokenizer of data without text


@dataclass
class DataConfig:
    """Sources of training data, and how documents become rows.

    By ``kind``, ``stdlib`` reads the library sources of this Python, which every machine has;
    ``text``, ``jsonl`` and ``parquet`` read files; ``hub`` reads data sets of ``datasets``.
    ``chat`` reads conversations from JSON lines or parquet, and ``stdlib_chat`` makes questions
    about the library. ``preference`` and ``stdlib_preference`` have two answers to each prompt, one
    of them preferred (recipe=dpo). ``benchmark`` has no text: random ids of the model's vocabulary,
    to measure speed. ``path`` is a file, folder, glob or Hub id; ``sources`` mixes several in its
    place; ``subset`` and ``split`` are those of a Hub data set. ``tokenizer`` is ``byte``, a folder
    or a Hub id. ``text_key`` is the JSON key or column of the text, ``max_bytes`` limits the text
    read. ``document_mask`` keeps attention within a document, ``on_long`` says what happens to a
    document longer than a row, ``val_fraction`` is the share of documents for validation, and the
    section ``chat`` is for conversations.
    """

    # kind of data, see above
    kind: Literal[
        "stdlib",
        "text",
        "jsonl",
        "parquet",
        "hub",
        "chat",
        "stdlib_chat",
        "preference",
        "stdlib_preference",
        "benchmark",
    ] = "stdlib"
    # file, directory or glob. For conversations and kind=hub also the id of a Hub data set, or the
    # directory of save_to_disk of datasets
    path: PathText | None = None
    # several sources instead of path, mixed by weight
    sources: list[SourceConfig] = field(default_factory=list)
    subset: str | None = None  # configuration of a Hub data set
    split: str = "train"  # split of a Hub data set, or of one that datasets saved
    # byte, or a directory or Hub id with a tokenizer; null: tokenizer of model.hf_path, else byte
    tokenizer: PathText | None = None
    text_key: str = "text"  # JSON key or parquet column with the text
    document_mask: bool = True  # true: tokens attend only within their own document
    # reaction to a document longer than train.seq_len: split it over rows, stop with an error, drop
    # it, or truncate its end. Conversations are never split, and only they are dropped or truncated
    on_long: Literal["split", "error", "drop", "truncate"] = "split"
    # share of documents for validation, kept out of training even if train.val_every=0; 0: none
    val_fraction: float = 0.02
    max_bytes: int | None = None  # UTF-8 bytes of text to read at most; null: all
    chat: ChatConfig = field(default_factory=ChatConfig)

    @property
    def is_chat(self) -> bool:
        """True if documents are conversations or preferences, of which only answers are trained."""
        return self.kind in CHAT_KINDS

    @property
    def is_preference(self) -> bool:
        """True if documents are pairs: a prompt with a preferred and a rejected answer."""
        return self.kind in PREFERENCE_KINDS

    @property
    def is_synthetic(self) -> bool:
        """True if the data is random token ids, not text, and only measures speed."""
        return self.kind == "benchmark"


def sources_of(data: DataConfig) -> list[tuple[str, float, DataConfig]]:
    """Return (name, weight, ``DataConfig`` of this source alone) of each source.

    Shares of the rows are weights divided by their sum. Without ``data.sources`` there is one
    source, whose name is empty.
    """
    if not data.sources:
        return [("", 1.0, data)]
    sources = []
    for source in data.sources:
        settings = {key: value for key, value in vars(source).items() if value is not None}
        weight = settings.pop("weight")
        place = (source.path or source.kind or data.kind).rstrip("/").rpartition("/")[2]
        name = settings.pop("name", "") or place.partition(".")[0]
        chat = {key: settings.pop(key) for key in ("format", "keys", "roles") if key in settings}
        settings |= {"chat": replace(data.chat, **chat), "path": source.path, "sources": []}
        sources.append((name, weight, replace(data, **settings)))
    return sources
