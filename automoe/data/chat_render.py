"""Rendering of messages as text and token ids by ``transformers``, as an inference server does it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from typing import Any

from automoe.config.data_schema import ChatConfig
from automoe.data.chat import Message
from automoe.data.corpora import Record
from automoe.data.tokenizer import load_for_templates, stored_template
from automoe.data.turns import as_tool_call
from automoe.errors import DataError
from automoe.storage.guarded import doing

_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_MOST_BYTES = 1 << 28  # of a rendered conversation
# name, argument and value of a tool call that is rendered to find out how a template writes calls
PROBE = "probe_name", "probe_key", "7040961"
# Noncharacters of Unicode. ``TEXT`` goes into the name of a special token that must stay text, and
# ``_TOKEN`` before a name that the template writes as a token.
TEXT, _TOKEN = "\ufdd0", "\ufdd1"


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Turn any exception in a ``with`` block, which renders a conversation, into a ``DataError``.

    The message begins with ``where``, e.g. ``file:line`` of a conversation.
    """
    doing(f"{where}: chat template", goes_on=True)  # one limit for all renders of a conversation
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # The expressions of a template may raise anything.
        raise DataError(
            f"{where}: the chat template refuses this conversation "
            f"({type(error).__name__}: {error}). Correct the line, or set data.chat.template to another template."
        ) from error


class ChatRenderer:
    """Renderer of messages to text by a Jinja chat template, and to ids by its tokenizer.

    Attributes:
        stored: text of the chat template in use.
        own: the same text if ``data.chat.template`` is set; None if the tokenizer's template is
            used.

    Args:
        chat: ``data.chat``: the template, its arguments, and how special tokens in messages are
            read.
        tokenizer: ``byte``, or the directory or pinned Hub id of a HuggingFace tokenizer.

    Raises:
        ConfigError: there is no template, or the tokenizer cannot be loaded.
    """

    def __init__(self, chat: ChatConfig, tokenizer: str) -> None:
        self.chat = chat
        self.tokenizer = tokenizer
        self.stored = stored_template(chat, tokenizer)
        self.own = self.stored if chat.template is not None else None
        self._tool_form: tuple[bool, Any] | None = None

    @cached_property
    def _hf(self) -> Any:
        return load_for_templates(self.tokenizer)

    @cached_property
    def _special(self) -> set[int]:
        special = {i for i, token in self._hf.added_tokens_decoder.items() if token.special}
        return special | {self._hf.eos_token_id}

    @cached_property
    def _special_names(self) -> list[str]:
        return self._hf.convert_ids_to_tokens(sorted(i for i in self._special if i is not None))

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """Pattern that matches the name of any special token except ``<think>`` and ``</think>``.

        Those two are also special tokens in messages, because datasets write reasoning with them.
        """
        names = (n for n in self._special_names if not re.fullmatch("</?think>", n))
        names = sorted(names, key=len)
        return re.compile("|".join(map(re.escape, reversed(names))) or "(?!)")

    def decode(self, ids: Sequence[int]) -> str:
        return self._hf.decode([int(i) for i in ids], skip_special_tokens=False)

    def _render(
        self,
        messages: list[Message],
        tools: list[Record] | None,
        prompt: bool = False,
        args: Record | None = None,
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.own if self.own is not None else self._hf.get_chat_template(None, tools)
        # transformers does not let a caller replace the template function strftime_now.
        if self.chat.date is not None:
            day = date.fromisoformat(self.chat.date)
            template = _DATE.sub(lambda match: json.dumps(day.strftime(match[2])), template)
        variables = self._hf.special_tokens_map | (self.chat.template_args or {}) | (args or {})
        [text], _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt,
            **variables,
        )
        if len(text.encode()) > _MOST_BYTES:
            raise ValueError(f"it writes {len(text):,} characters")
        return text

    def _as_text(self, value: Any) -> Any:
        """Return messages or tools in which a marker character breaks up names of special tokens.

        A broken name is encoded as plain text, and the marker is removed then. Under
        ``data.chat.special_text=token`` the value is returned unchanged.
        """
        if self.chat.special_text == "token":
            return value
        said = json.dumps(value, ensure_ascii=False, default=str)
        return json.loads(self._names.sub(lambda name: name[0][0] + TEXT + name[0][1:], said))

    @cached_property
    def _marked(self) -> Any:
        """Copy of the tokenizer in which names of special tokens begin with a marker character.

        Names that the template itself wrote get the same marker before a text is encoded, names in
        messages do not. So only the template can write special tokens.
        """
        from tokenizers import Tokenizer

        named = rf'"({self._names.pattern})"'
        content = self._hf.backend_tokenizer.to_str()
        tokenizer = Tokenizer.from_str(re.sub(named, rf'"{_TOKEN}\g<1>"', content))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        doing(f"{self.tokenizer}: tokenizer, of {len(texts)} texts that begin {texts[:1]!r:.60}")
        if self.chat.special_text == "text":
            texts = [self._names.sub(rf"{_TOKEN}\g<0>", text).replace(TEXT, "") for text in texts]
            encoded = self._marked.encode_batch(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encoded]
        return self._hf(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]

    def _normal(self, messages: list[Message], where: str) -> list[Message]:
        """Return messages in the form the template takes: text parts joined, tool calls converted.

        Args:
            where: ``file:line`` of the conversation, for an error.
        """
        turns = []
        for message in messages:
            if isinstance(parts := message.get("content"), list):
                message = message | {"content": self._joint.join(part["text"] for part in parts)}
            if calls := message.get("tool_calls"):
                self._tool_form = self._tool_form or self._find_tool_form(where)
                as_text, empty = self._tool_form
                message = message | {"tool_calls": [as_tool_call(call, as_text) for call in calls]}
                if not message["content"]:
                    message["content"] = empty
            turns.append(self._as_text(message))
        return turns

    @cached_property
    def _joint(self) -> str:
        """Text that the template writes between two text parts of a message.

        It is a line end if the template takes only plain text as content; inference servers join
        parts in this way.
        """
        parts = [{"type": "text", "text": text} for text in PROBE[:2]]
        try:
            text = self._render([{"role": "user", "content": parts}], None)
        except Exception:  # The template takes only text.
            return "\n"
        between, probe, _ = text.partition(PROBE[0])[2].partition(PROBE[1])
        return between if probe and not between.strip() else "\n"

    def _find_tool_form(self, where: str) -> tuple[bool, Any]:
        """Return in which form the template takes tool calls, found by trying each form.

        Most templates do not fail on a wrong form: they write Python's brackets or JSON inside
        JSON, or leave the call out. So the rendered text is examined.

        Args:
            where: ``file:line`` of the conversation, for the error.

        Returns:
            (True if arguments must be JSON text, False if an object; content of a message that has
            calls and no text: "" or None).

        Raises:
            DataError: the template writes calls in none of the forms.
        """
        name, key, value = PROBE
        question = {"role": "user", "content": "q"}
        for as_text in (False, True):
            for empty in ("", None):
                arguments = {key: value}
                answer = calling(empty, json.dumps(arguments) if as_text else arguments)
                try:
                    before = self._render([question], None, prompt=True)
                    text = self._render([question, answer], None)[len(before) :]
                except Exception:  # The template does not take this form.
                    continue
                written = name in text and key in text and value in text
                if written and f"{{'{key}'" not in text and f'\\"{key}' not in text:
                    return as_text, empty
        raise DataError(
            f"{where}: the chat template writes no tool calls. Set data.chat.template to one that does, or leave "
            f"conversations with calls out."
        )


def calling(content: str | None, arguments: Any) -> Message:
    """Return an assistant message with a tool call, rendered to see how a template writes calls.

    Args:
        content: text of the message beside the call.
        arguments: arguments of the call, as JSON text or as an object.
    """
    function = {"name": PROBE[0], "arguments": arguments}
    call = {"id": "probe0000", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
