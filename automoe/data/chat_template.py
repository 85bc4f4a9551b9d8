"""Conversations as tokens, with marks on the tokens that a model has to generate.

Chat templates published with checkpoints do not mark where answers begin and end. So this module
finds out: an answer begins after the longest common prefix of two renders (the messages before it
with generation prompt, and the messages through it), and ends with the stop token. As at inference,
``transformers`` renders the text and tokenises it; the library is imported when first used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import cache, cached_property, partial
from pathlib import Path

from automoe.config.data_schema import ChatConfig
from automoe.config.hub import local_folder
from automoe.config.schema import Config, tokenizer_of
from automoe.data.chat import Conversation, Message
from automoe.data.chat_render import PROBE, TEXT, ChatRenderer, calling, refusing
from automoe.data.corpora import Record
from automoe.data.tokenizer import OTHER_TEMPLATES, TEMPLATE, stored_template
from automoe.data.turns import (
    TEXTS,
    Sample,
    Turn,
    begin_of_answer,
    is_wanted,
    joined,
    num_left_out,
    num_shared,
)
from automoe.errors import ConfigError, DataError

_OPEN = re.compile(r"<((?:\w+:)?think\w*)>\s*$")  # a generation prompt that opens reasoning
_VERSION = 5  # Raise it if a change gives the same template and record other tokens or marks.
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_ASKING = ("system", "developer", "user")  # roles whose text a template should write unchanged


class ChatTemplate(ChatRenderer):
    """Converter of conversations to token ids and loss masks, as ``transformers`` does it.

    Attributes:
        digest: hash of all settings that affect the tokens of a record.
        counts: totals over all calls of ``samples``, printed by ``describe_chat``. ``answers``
            counts answers; among them are ``prompt_cut`` (written without the end of the generation
            prompt), ``eos_added`` (without a stop token), ``empty`` (nothing but a stop token is
            trained) and ``no_reasoning`` (the generation prompt opens reasoning, and there is
            none). ``left_out`` counts texts, tools and arguments of conversations that the template
            does not write.
        first: for each key of ``counts``, file index and line of the first conversation counted.

    Args:
        chat: ``data.chat``: the template, its arguments, and which answers are trained.
        tokenizer: ``byte``, or the directory or pinned Hub id of a HuggingFace tokenizer.

    Raises:
        ConfigError: there is no template, or the tokenizer cannot be loaded.
    """

    def __init__(self, chat: ChatConfig, tokenizer: str) -> None:
        super().__init__(chat, tokenizer)
        settings = [
            _VERSION,
            chat.format,
            chat.keys,
            chat.roles,
            chat.template_args,
            chat.turns,
            chat.special_text,
            self.stored,
        ]
        if "strftime_now" in self.stored:
            settings.append(chat.date)
        self.digest = hashlib.blake2b(
            json.dumps(settings, sort_keys=True).encode(), digest_size=8
        ).hexdigest()
        self._ending = cache(self._find_ending)
        self.counts: Counter[str] = Counter()
        self.first: dict[str, tuple[int, int]] = {}

    def tokenizer_settings(self) -> bytes:
        """Return the bytes of the tokenizer's settings files, which name its special tokens.

        A chat template may write these tokens, so the bytes are hashed into the name of the cached
        corpus. ``tokenizer.json`` is not among the files.
        """
        files = [local_folder(self.tokenizer) / name for name in _SETTINGS]
        return b"".join(file.read_bytes() for file in files if file.is_file())

    def samples(self, conversations: Sequence[Conversation]) -> list[list[Sample]]:
        """Return the token sequences of each conversation; each answer is trained in one of them.

        A conversation is one sequence if the rendered text through each answer is the beginning of
        the text through the next answer. If the template rewrites earlier turns (it drops
        reasoning, or ends the last answer differently), the conversation becomes several.
        ``data.chat.turns=last`` trains only the last answer. An answer with weight 0 in its record,
        in the conversation's ``prompt``, or before all other messages, is never trained.

        Returns:
            For each conversation its sequences: ids, and spans of the answers that are trained.

        Raises:
            DataError: a conversation has no answer to train, or the template refuses it. The
                message names file and line.
            ConfigError: the template always ends in a generation prompt, or no token ends answers.
        """
        texts = []
        calling = []  # per conversation and answer: True if it calls tools, and the arguments
        for conversation in conversations:
            conversation = replace(conversation, tools=self._as_text(conversation.tools))
            messages = self._normal(conversation.messages, conversation.where)
            first = max(1, conversation.prompt)
            answers = [
                n
                for n, m in enumerate(messages)
                if m["role"] == "assistant" and n >= first and is_wanted(m)
            ]
            if not answers:
                raise DataError(
                    f"{conversation.where}: no token to train on: no assistant message follows another one (or has a "
                    f"weight above 0). Remove this line, or set data.chat.roles to what stands for the assistant."
                )
            if self.chat.turns == "last":
                answers = answers[-1:]
            args = json.dumps(conversation.args)
            calling.append([(bool(messages[n].get("tool_calls")), args) for n in answers])
            for n in answers:
                texts += self._renders(conversation, messages, n)
            names = [
                str(tool.get("function", tool).get("name")) for tool in conversation.tools or ()
            ]
            asking = [m["content"] for m in messages[: answers[-1]] if m["role"] in _ASKING]
            left_out = num_left_out(names + asking, texts[-2])
            unread = conversation.args.keys() - re.findall(r"\w+", self.stored)
            self._count("left_out", conversation, left_out + len(unread))
        ids = self._encode(texts)
        renders = zip(texts[::2], texts[1::2], ids[::2], ids[1::2], strict=True)
        return [
            list(joined([self._turn(*next(renders), calls) for calls in answers]))
            for answers in calling
        ]

    def exported(self) -> dict[str, str]:
        """Return file name -> content of the chat template's files for an exported checkpoint.

        ``data.chat.template_args`` are written into them as defaults. The result is {} if the
        tokenizer's own files can be used unchanged.
        """
        if self.own is None and not self.chat.template_args:
            return {}
        # Jinja reads Python's literals, but not JSON's null. It drops the line end after a block, so
        # each of these lines needs one of its own.
        lines = "".join(
            f"{{%- if {k} is not defined %}}{{% set {k} = {v!r} %}}{{% endif %}}\n"
            for k, v in (self.chat.template_args or {}).items()
        )
        stored = self.own or self._hf.chat_template
        named = {"default": stored} if isinstance(stored, str) else stored
        return {
            TEMPLATE if n == "default" else f"{OTHER_TEMPLATES}/{n}.jinja": lines + text
            for n, text in named.items()
        }

    def stop_id(self) -> int:
        """Return the id of the token that ends an answer, found by rendering a test conversation.

        Raises:
            DataError: the template refuses the test conversation.
            ConfigError: neither the template nor the tokenizer has a token that ends an answer.
        """
        messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
        conversation = Conversation(
            messages, None, Path(self.chat.template or self.tokenizer), 0, 1
        )
        return self.samples([conversation])[0][-1].ids[-1]

    def prompt(self, messages: list[Message], tools: list[Record] | None = None) -> list[int]:
        """Return the ids of ``messages`` and the generation prompt, after which a model answers.

        Args:
            tools: JSON schemas of the tools that the model may call; None: there are none.

        Raises:
            DataError: the template refuses the messages, or cannot write their tool calls.
        """
        with refusing("the prompt"):
            messages = self._normal(messages, "messages")
            text = self._render(messages, self._as_text(tools), prompt=True)
        return self._encode([text])[0]

    # One answer
    # ------------------------------------------------------------------------------------

    def _renders(
        self, conversation: Conversation, messages: list[Message], n: int
    ) -> tuple[str, str]:
        """Return two rendered texts: the conversation up to answer ``messages[n]``, and through it.

        The first ends with the generation prompt, or with the part of it that the template keeps
        before an answer. The second begins with the first.

        Args:
            conversation: gives the tools, the template's arguments, and file and line for an error.
            messages: its messages in the form that the template takes.
            n: index of the answer in ``messages``.

        Raises:
            DataError: the template leaves out the answer or its tool calls.
            ConfigError: the template always ends in a generation prompt.
        """
        render = partial(self._render, tools=conversation.tools, args=conversation.args)
        answer = messages[n]
        content = answer["content"] or ""
        said = {key: answer[key] for key in TEXTS if isinstance(answer.get(key), str)}
        with refusing(conversation.where):
            plain = render(messages[:n])
            before = asked = render(messages[:n], prompt=True)
            through = render(messages[: n + 1])
            if not through.startswith(before):
                # The template writes the question differently after its answer is known (Mistral
                # puts the system prompt into the last message), or another text between two
                # answers, or less than its generation prompt. Inference has the text ``before``,
                # so the answer is joined to it.
                other = {key: "." if text.strip()[:1] != "." else ":" for key, text in said.items()}
                changed = render([*messages[:n], answer | other])
                head = through[: num_shared(changed, through)]
                begin, end = begin_of_answer(head, before, plain, num_shared(before, through))
                before, through = before[:end], before[:end] + through[begin:]
                self._count("prompt_cut", conversation, before != asked)
        written = through[len(before) :]
        words = re.findall(r"\w+", content.casefold())
        if words and not any(word in written.casefold() for word in words):
            raise DataError(
                f"{conversation.where}: the chat template leaves out the text of message {n + 1}, the answer. Remove "
                f"this line, or set data.chat.template to a template that writes it."
            )
        if self._always_opens:
            raise ConfigError(
                "data.chat.template",
                self.chat.template,
                "it begins another answer after the last one, whether add_generation_prompt is true or not",
                "Write its last lines between {% if add_generation_prompt %} and {% endif %}",
            )
        calls = answer.get("tool_calls") or ()
        self._count("empty", conversation, not any(map(str.strip, said.values())) and not calls)
        shown = asked[num_shared(plain, asked) :] + written
        self._count("left_out", conversation, num_left_out(said.values(), shown))
        if opened := _OPEN.search(asked):
            silent = before != asked or written.lstrip().startswith(f"</{opened[1]}>")
            self._count("no_reasoning", conversation, silent)
        written = written.replace(content, "", 1)
        for call in calls:
            name = str(call.get("function", call).get("name"))
            if name not in written:
                raise DataError(
                    f"{conversation.where}: the chat template leaves out the call of {name!r} in message {n + 1}. "
                    f"Remove the text beside the call, or set data.chat.template to a template that writes both."
                )
        return before, through

    def _count(self, key: str, conversation: Conversation, number: int) -> None:
        self.counts[key] += number
        if number:
            self.first.setdefault(key, (conversation.file, conversation.line))

    def _turn(
        self, before: str, through: str, prompt: list[int], ids: list[int], asked: tuple[bool, str]
    ) -> Turn:
        """Return the ids up to the end of an answer, and the index of the answer's first id.

        If the template writes no token that ends an answer, one is appended: the special token that
        begins the next message, else EOS.

        Args:
            before: rendered text of the conversation up to the answer, with the generation prompt.
            through: rendered text of the conversation through the answer.
            prompt, ids: token ids of ``before`` and of ``through``.
            asked: (True if the answer calls tools, the conversation's arguments for the template as
                JSON), by which the token that ends such answers is looked up.

        Raises:
            ConfigError: neither template nor tokenizer has a token that ends an answer.
        """
        start = num_shared(prompt, ids)
        self.counts["answers"] += 1
        if start < len(prompt):
            # The tokenizer would merge the end of the prompt with the beginning of the answer; at
            # inference it encodes the prompt alone.
            ids = prompt + self._encode_inside(through[len(before) :])
            start = len(prompt)
        end = self._stop(ids, start, asked)
        if end is not None:
            return ids[:end], start
        # The template writes no token that ends an answer: the next turn's first one does, or EOS.
        stop_id = self._ending(*asked)[1]
        if stop_id is None:
            stop_id = self._hf.eos_token_id
            self.counts["eos_added"] += 1
        if stop_id is None:
            raise ConfigError(
                "data.tokenizer",
                self.tokenizer,
                "its chat template ends answers without a special token, and it has no eos_token to put there",
                "Set eos_token in its tokenizer_config.json",
            )
        return [*ids, stop_id], start

    def _encode_inside(self, text: str) -> list[int]:
        """Return the ids that ``text`` has in the middle of a longer text.

        Some tokenizers add a space at the beginning of a text; the ids do not include it.
        """
        for prefix in ("", "\n", "."):
            head, ids = (
                self._encode([prefix, prefix + text]) if prefix else ([], *self._encode([text]))
            )
            written = self.decode(head) + text.replace(TEXT, "")
            if ids[: len(head)] == head and self.decode(ids) == written:
                return ids[len(head) :]
        return self._encode([text])[0]

    def _stop(self, ids: list[int], start: int, asked: tuple[bool, str]) -> int | None:
        """Return the index after the special token that ends an answer; None if there is none.

        After that token ``ids`` hold only what the template writes after every answer.

        Args:
            ids: token ids of the conversation through the answer.
            start: index of the answer's first token.
            asked: arguments of ``_find_ending``, by which the template's text after answers is
                known: (True if the answer calls tools, the template's arguments as JSON).
        """
        ends = [end for end in range(len(ids), start, -1) if ids[end - 1] in self._special]
        behind = {end: self.decode(ids[end:]).strip() for end in ends}
        if closing := self._ending(*asked)[0].strip():
            for end in ends:
                if behind[end] == closing:
                    return end
        return ends[0] if ends and not behind[ends[0]] else None

    def _find_ending(self, calls: bool, args: str) -> tuple[str, int | None]:
        """Find out, by rendering test messages, how the template ends a conversation's last answer.

        Several special tokens may follow the text of an answer. Those that the template also writes
        after an answer that is not the last one end the answer (two tokens for Command-R). Others
        close the conversation (Phi-3 writes end of text after end of turn), unless they stand in
        place of the token that ends other answers (GPT-OSS).

        Args:
            calls: True if the answer calls tools.
            args: the conversation's arguments for the template, as JSON.

        Returns:
            (text that follows the end of the last answer; id of the special token that begins the
            next message, or None if none does).
        """
        render = partial(self._render, tools=None, args=json.loads(args))
        answer = {"role": "assistant", "content": PROBE[2]}
        if calls:
            answer = calling("", {PROBE[1]: PROBE[2]})
        try:
            messages = self._normal([{"role": "user", "content": "q"}, answer], "a probe")
            through = render(messages)
            more = render([*messages, {"role": "tool" if calls else "user", "content": "x"}])
        except Exception:  # A template may require an id, or another order of roles.
            through = more = ""
        tail = through.partition(PROBE[2])[2]
        inside = more.partition(PROBE[2])[2]
        in_both = tail[: num_shared(tail, inside)]
        end = self._end_of_last_special(in_both) or self._end_of_last_special(tail)
        opener = more.removeprefix(through).lstrip() if more != through else ""
        token = self._encode([opener])[0][0] if opener else None
        closing = tail[end or len(tail) :]
        return closing, token if token in self._special else None

    def _end_of_last_special(self, text: str) -> int:
        """Return the index in ``text`` after its last special token; 0 if it has none."""
        ends = (text.rfind(name) + len(name) for name in self._special_names if name in text)
        return max(ends, default=0)

    @cached_property
    def _always_opens(self) -> bool:
        """True if the template writes a generation prompt despite ``add_generation_prompt=False``.

        It is False if the template writes the same text before a user's next message too: such a
        text is no generation prompt. It is also False if the template refuses test messages.
        """
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        try:
            through = self._render(messages, None)
            asked = self._render(messages, None, prompt=True)
            more = self._render([*messages, messages[0]], None)
        except Exception:  # A template may require more than these messages.
            return False
        return through == asked and not more.startswith(through)


def chat_template_of(config: Config) -> ChatTemplate | None:
    """Return the chat template if ``config`` trains on conversations, else None.

    Raises:
        ConfigError: there is no template, or the tokenizer cannot be loaded.
    """
    return ChatTemplate(config.data.chat, tokenizer_of(config)) if config.data.is_chat else None


def with_date(config: Config) -> Config:
    """Return ``config`` with today as ``data.chat.date`` if the chat template writes the date.

    A date that is already set stays. Without a fixed date the template would write another text for
    the same conversations tomorrow.

    Raises:
        ConfigError: there is no template, or it cannot be read.
    """
    chat = config.data.chat
    if (
        chat.date is None
        and config.data.is_chat
        and "strftime_now" in stored_template(chat, tokenizer_of(config))
    ):
        chat = replace(chat, date=date.today().isoformat())
    return replace(config, data=replace(config.data, chat=chat))
