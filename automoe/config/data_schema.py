"""The section ``data`` of the configuration: where text and conversations come from.

Nothing here imports torch or Hydra.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(repr=False)
class SourceConfig:
    """One of several sources; what is null is as in ``data``."""

    path: str | None = None  # as data.path
    name: str | None = None  # in metrics; null: that of the file or directory, without its ending
    weight: float = 1.0  # its share of the rows is this over the sum of all weights
    kind: str | None = None
    text_key: str | None = None
    subset: str | None = None
    split: str | None = None
    format: Literal["messages", "sharegpt", "alpaca"] | None = None  # these three: as in data.chat
    keys: dict[str, str] | None = None
    roles: dict[str, str] | None = None

    def __repr__(self) -> str:
        return (
            "{"
            + ", ".join(f"{key}: {value}" for key, value in vars(self).items() if value is not None)
            + "}"
        )


@dataclass
class ChatConfig:
    """Conversations: how they are written down, rendered and trained on (``docs/finetune.md``)."""

    # messages: role and content; sharegpt: conversations of from and value; alpaca: instruction,
    # input and output
    format: Literal["messages", "sharegpt", "alpaca"] = "messages"
    # Other names in the data, such as {messages: dialogue, role: speaker, content: text, prompt:
    # question}
    keys: dict[str, str] | None = None
    roles: dict[str, str] | None = None  # other names of roles, such as {bot: assistant}
    # A file with a chat template, or plain: "user: ...", "assistant: ..."; null: the tokenizer's
    # own
    template: str | None = None
    # What the template takes besides messages, such as {enable_thinking: false}
    template_args: dict[str, str | bool | int | float] | None = None
    # What templates that ask for the date are told, such as 2026-11-23; null: the day on which the
    # run began
    date: str | None = None
    turns: Literal["all", "last"] = "all"  # answers that are trained
    # several samples in a row, each attending to itself alone; false: a sample a row
    pack: bool = True


PREFERENCE_KINDS = ("preference", "stdlib_preference")
CHAT_KINDS = ("chat", "stdlib_chat", *PREFERENCE_KINDS)
NO_TOKENIZER = "none"  # in the place of a tokenizer's name: there is no text


@dataclass
class DataConfig:
    """``stdlib`` is this Python's own library sources: real text that every machine has.
    ``benchmark`` is no text but synthetic ids of the model's vocabulary, to measure speed with.

    ``chat`` is conversations in JSON lines or parquet, ``stdlib_chat`` questions about that
    library; ``preference`` and ``stdlib_preference`` are such with two answers, one of which is
    preferred (recipe=dpo).
    """

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
    # file, folder or glob; of conversations and kind hub also a Hub id, or what datasets saved
    path: str | None = None
    # several, mixed by weight, in place of path
    sources: list[SourceConfig] = field(default_factory=list)
    subset: str | None = None  # of the Hub: which of the data set's configurations
    split: str = "train"  # of the Hub, or saved by datasets: which of its splits
    # byte, or a directory or Hub id with a tokenizer; null: model.hf_path's, or byte
    tokenizer: str | None = None
    text_key: str = "text"  # jsonl field or parquet column
    document_mask: bool = True  # tokens attend within their own document only
    # A document longer than seq_len; a conversation is never split, but can be left out or cut at
    # its end
    on_long: Literal["split", "error", "drop", "truncate"] = "split"
    # share of documents kept for validation, even if train.val_every=0; 0: none
    val_fraction: float = 0.02
    max_bytes: int | None = None  # stop reading the corpus after this many bytes
    chat: ChatConfig = field(default_factory=ChatConfig)

    @property
    def is_chat(self) -> bool:
        """Whether documents are conversations, of which answers alone are trained."""
        return self.kind in CHAT_KINDS

    @property
    def is_preference(self) -> bool:
        """Whether documents are pairs: a prompt with an answer that is preferred and one that is
        not."""
        return self.kind in PREFERENCE_KINDS

    @property
    def is_synthetic(self) -> bool:
        """Whether there is no text: what is trained is worth nothing but its speed."""
        return self.kind == "benchmark"
