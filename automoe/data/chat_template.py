"""Conversations as tokens, with the tokens that a model would have to generate marked.

No stored template of the main families says where answers begin and end, so that is found: an
answer reaches from the longest common prefix of (messages before + generation prompt) and (messages
through the answer) to the stop token. Text is rendered by ``transformers`` and tokenised by its
tokenizer, as they are at inference; both are imported here where they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from automoe.config.data_schema import ChatConfig
from automoe.config.hub import local_folder
from automoe.config.schema import Config, tokenizer_of
from automoe.data.chat import Conversation, Message
from automoe.data.tokenizer import OTHER_TEMPLATES, TEMPLATE, load_for_templates, stored_template
from automoe.data.turns import (
    Sample,
    Turn,
    as_tool_call,
    end_of_prompt,
    in_parts,
    is_empty,
    is_wanted,
    joined,
)
from automoe.errors import ConfigError, DataError

_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_VERSION = 3  # raise it when the same template and record give other tokens or marks
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PROBE = "probe_name", "probe_key", "probe value"
_ASKING = ("system", "developer", "user")  # roles whose text a template should show as it is


class ChatTemplate:
    """Renders and tokenises conversations as ``transformers`` does at inference.

    Attributes:
        digest: changes when the same record could give other tokens.
        own: the template that ``data.chat.template`` names; None: the tokenizer's.
        counts: what was met so far: ``answers``; of them ``apart`` (the tokenizer would have merged
            the answer's first characters with the prompt), ``prompt_cut`` (the template writes
            answers otherwise than its generation prompt begins them), ``eos_added`` (no stop
            token), ``empty``; conversations with ``tools_unseen``; messages before answers that are
            ``unseen``.

    Raises:
        ConfigError: there is no template, or the tokenizer cannot be loaded.
    """

    def __init__(self, chat: ChatConfig, tokenizer: str) -> None:
        self.chat = chat
        self.tokenizer = tokenizer
        stored = stored_template(chat, tokenizer)
        self.own = stored if chat.template is not None else None
        settings = [
            _VERSION,
            chat.format,
            chat.keys,
            chat.roles,
            chat.template_args,
            chat.turns,
            stored,
        ]
        if "strftime_now" in stored:
            settings.append(chat.date)
        self.digest = hashlib.blake2b(
            json.dumps(settings, sort_keys=True).encode(), digest_size=8
        ).hexdigest()
        self._tool_form: tuple[bool, Any] | None = None
        self._endings: dict[bool, tuple[str, int | None]] = {}
        self.counts: Counter[str] = Counter()

    @cached_property
    def _hf(self) -> Any:
        return load_for_templates(self.tokenizer)

    @cached_property
    def _special(self) -> set[int]:
        special = {i for i, token in self._hf.added_tokens_decoder.items() if token.special}
        return special | {self._hf.eos_token_id}

    def tokenizer_settings(self) -> bytes:
        """What the tokenizer's folder says besides ``tokenizer.json``: special tokens, which
        templates write, too."""
        files = [local_folder(self.tokenizer) / name for name in _SETTINGS]
        return b"".join(file.read_bytes() for file in files if file.is_file())

    def samples(self, conversations: Sequence[Conversation]) -> list[list[Sample]]:
        """Of each conversation the samples that train its answers, every answer in one of them.

        One sample where the render through an answer goes on in the render through the next. Where
        the template rewrites what came before (it drops reasoning, or ends the last answer in a
        token of its own), the conversation is unrolled. With ``turns=last`` the last answer alone
        is trained.

        Raises:
            DataError: with file and line: no answer to train on, or the template refuses the
                conversation.
        """
        texts: list[str] = []
        asked: list[tuple[list[Message], list[int]]] = []
        for conversation in conversations:
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
            answers = answers[-1:] if self.chat.turns == "last" else answers
            self.counts["empty"] += sum(is_empty(messages[n]) for n in answers)
            asked.append((messages, answers))
            for n in answers:
                texts += self._renders(conversation, messages, n)
            names = [
                str(tool.get("function", tool).get("name")) for tool in conversation.tools or ()
            ]
            self.counts["tools_unseen"] += any(name not in texts[-2] for name in names)
            asking = [m["content"].strip() for m in messages[: answers[-1]] if m["role"] in _ASKING]
            self.counts["unseen"] += sum(text not in texts[-2] for text in asking)
        encoded = iter(self._encode(texts))
        rendered = iter(texts)
        found = []
        for messages, answers in asked:
            turns = []
            for n in answers:
                pair = next(rendered), next(rendered)
                calls = bool(messages[n].get("tool_calls"))
                turns.append(self._turn(pair, next(encoded), next(encoded), calls))
            found.append(list(joined(turns)))
        return found

    def exported(self) -> dict[str, str]:
        """Files of an export's templates, with ``template_args`` as their defaults; none: as the
        tokenizer has them."""
        if self.own is None and not self.chat.template_args:
            return {}
        given = (self.chat.template_args or {}).items()
        # Jinja reads Python's literals, not JSON's null, and drops a line end behind a block: ours,
        # not the template's.
        lines = "".join(
            f"{{%- if {k} is not defined %}}{{% set {k} = {v!r} %}}{{% endif %}}\n"
            for k, v in given
        )
        stored = self.own or self._hf.chat_template
        named = {"default": stored} if isinstance(stored, str) else stored
        return {
            TEMPLATE if n == "default" else f"{OTHER_TEMPLATES}/{n}.jinja": lines + text
            for n, text in named.items()
        }

    def stop_id(self) -> int:
        """The token that ends an answer."""
        path = Path("a first question")
        conversation = Conversation(
            [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}],
            None,
            path,
            0,
            1,
        )
        return self.samples([conversation])[0][-1].ids[-1]

    def prompt(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """What a model is given to answer ``messages``. Raises DataError for calls that the
        template cannot write."""
        return self._encode([self._render(self._normal(messages, "messages"), tools, prompt=True)])[
            0
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return self._hf.decode([int(i) for i in ids], skip_special_tokens=False)

    # One answer
    # ------------------------------------------------------------------------------------

    def _renders(
        self, conversation: Conversation, messages: list[Message], n: int
    ) -> tuple[str, str]:
        """The text before the answer ``messages[n]``, generation prompt included, and the text
        through it."""
        tools = conversation.tools
        answer = messages[n]
        try:
            before = self._render(messages[:n], tools, prompt=True)
            through = self._render(messages[: n + 1], tools)
            if len(os.path.commonprefix([before, through])) < len(
                self._render(messages[:n], tools).rstrip()
            ):
                # It writes the question otherwise once there is an answer (Mistral: the system
                # prompt goes along with the last message). At inference the question stands as it
                # does before, so that is kept.
                other = answer | {"content": "." if answer["content"].strip()[:1] != "." else ":"}
                changed = self._render([*messages[:n], other], tools)
                through = (
                    before
                    + through[end_of_prompt(os.path.commonprefix([changed, through]), before) :]
                )
        except Exception as error:  # whatever a template's expressions raise
            raise DataError(
                f"{conversation.where}: the chat template refuses this conversation "
                f"({type(error).__name__}: {error}). Correct the line, or set data.chat.template to another template."
            ) from error
        written = through[len(os.path.commonprefix([before, through])) :]
        words = re.findall(r"\w+", (answer["content"] or "").casefold())
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
        written = written.replace(answer["content"] or "", "", 1)
        for call in answer.get("tool_calls") or ():
            name = str(call.get("function", call).get("name"))
            if name not in written:
                raise DataError(
                    f"{conversation.where}: the chat template leaves out the call of {name!r} in message {n + 1}. "
                    f"Remove the text beside the call, or set data.chat.template to a template that writes both."
                )
        return before, through

    def _turn(self, texts: tuple[str, str], prompt: list[int], ids: list[int], calls: bool) -> Turn:
        """One answer's tokens, from the texts of ``_renders`` and their ids."""
        before, through = texts
        start = len(os.path.commonprefix([prompt, ids]))
        self.counts["answers"] += 1
        if start < len(prompt) and through.startswith(before):
            # One token holds the prompt's end and the answer's beginning: at inference the prompt
            # is all there is.
            ids = prompt + self._encode_inside(through[len(before) :])
            start = len(prompt)
            self.counts["apart"] += 1
        elif start < len(prompt):
            self.counts["prompt_cut"] += 1
            # else the border is that token's
            if prompt[start] not in self._hf.added_tokens_decoder:
                cut = len(os.path.commonprefix([before, through]))
                [head] = self._encode([through[:cut]])
                ids = head + self._encode_inside(through[cut:])
                start = len(head)
        end = self._stop(ids, start, calls)
        return (
            Turn([*ids, self._next_token(calls)], start) if end is None else Turn(ids[:end], start)
        )

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of a text that does not begin one: some tokenizers put a blank before what does."""
        for prefix in ("", "\n", "."):
            head, ids = (
                self._encode([prefix, prefix + text]) if prefix else ([], *self._encode([text]))
            )
            if ids[: len(head)] == head and self.decode(ids) == self.decode(head) + text:
                return ids[len(head) :]
        return self._encode([text])[0]

    def _stop(self, ids: list[int], start: int, calls: bool) -> int | None:
        """The place behind the special token that ends an answer, where what the template always
        writes follows it."""
        ends = [end for end in range(len(ids), start, -1) if ids[end - 1] in self._special]
        behind = {end: self.decode(ids[end:]).strip() for end in ends}
        if closing := self._ending(calls)[0].strip():
            for end in ends:
                if behind[end] == closing:
                    return end
        return ends[0] if ends and not behind[ends[0]] else None

    def _next_token(self, calls: bool) -> int:
        """What ends an answer where the template writes nothing: the token that opens the next
        turn, or the EOS."""
        opener_id = self._ending(calls)[1]
        if opener_id is None and self._hf.eos_token_id is None:
            rule = "its chat template ends answers in no special token, and it names no eos_token to put there"
            raise ConfigError(
                "data.tokenizer", self.tokenizer, rule, "Set eos_token in its tokenizer_config.json"
            )
        self.counts["eos_added"] += opener_id is None
        return self._hf.eos_token_id if opener_id is None else opener_id

    def _ending(self, calls: bool) -> tuple[str, int | None]:
        """What the template writes behind the token that ends any last answer, and the token that
        opens the next turn.

        Several special tokens may follow an answer's text. Those that follow it also where the
        conversation goes on are the turn's (Command-R's two); others close the conversation
        (Phi-3's end of text behind its end of turn), unless they stand in the place of the turn's
        own (GPT-OSS).
        """
        if calls not in self._endings:
            name, key, value = _PROBE

            def texts(said: str) -> tuple[str, str]:
                function = {"name": name, "arguments": {key: value + said}}
                call = {"id": "probe0000", "type": "function", "function": function}
                answer = {"role": "assistant", "content": "" if calls else said}
                messages = [
                    {"role": "user", "content": "q"},
                    answer | ({"tool_calls": [call]} if calls else {}),
                ]
                messages = self._normal(messages, "a probe")
                more = [*messages, {"role": "tool" if calls else "user", "content": "x"}]
                return self._render(messages, None), self._render(more, None)

            try:
                (through, more), (other, other_more) = texts("a"), texts("b")
            except Exception:  # a template may want an id, or the roles in another order
                through = more = other = other_more = ""
            tail = through[len(os.path.commonprefix([through, other])) + 1 :]
            inside = more[len(os.path.commonprefix([more, other_more])) + 1 :]
            ends = [
                self._end_of_last_special(text)
                for text in (os.path.commonprefix([tail, inside]), tail)
            ]
            opener = more.removeprefix(through).lstrip() if more != through else ""
            token = self._encode([opener])[0][0] if opener else None
            closing = tail[ends[0] or ends[1] or len(tail) :]
            self._endings[calls] = closing, token if token in self._special else None
        return self._endings[calls]

    def _end_of_last_special(self, text: str) -> int:
        """The place behind the last special token in ``text``; 0 where there is none."""
        names = self._hf.convert_ids_to_tokens(sorted(i for i in self._special if i is not None))
        return max((text.rfind(name) + len(name) for name in names if name in text), default=0)

    @cached_property
    def _always_opens(self) -> bool:
        """Whether a render without generation prompt ends in one, which what follows an answer does
        not begin with."""
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        try:
            through = self._render(messages, None)
            asked = self._render(messages, None, prompt=True)
            more = self._render([*messages, messages[0]], None)
        except Exception:  # a template may want more than this
            return False
        return through == asked and not more.startswith(through)

    # Rendering
    # -------------------------------------------------------------------------------------

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, prompt: bool = False
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.own if self.own is not None else self._hf.get_chat_template(None, tools)
        if self.chat.date is not None:  # transformers hands no function of ours to a template
            day = date.fromisoformat(self.chat.date)
            template = _DATE.sub(lambda found: json.dumps(day.strftime(found[2])), template)
        given = self._hf.special_tokens_map | (self.chat.template_args or {})
        [text], _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt,
            **given,
        )
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return self._hf(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]

    def _normal(self, messages: list[Message], where: str) -> list[Message]:
        """Messages with text in parts, and tool calls, in the form that this template writes
        out."""
        messages = [
            m | {"content": self._joint.join(p["text"] for p in m["content"])} if in_parts(m) else m
            for m in messages
        ]
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._tool_form is None:
            self._tool_form = self._find_tool_form(where)
        as_text, empty = self._tool_form
        found = []
        for message in messages:
            if calls := message.get("tool_calls"):
                message = message | {"tool_calls": [as_tool_call(call, as_text) for call in calls]}
                if not message["content"]:
                    message["content"] = empty
            found.append(message)
        return found

    @cached_property
    def _joint(self) -> str:
        """What the template writes between the parts of a text; a line end, as servers do, where it
        takes no parts."""
        parts = [{"type": "text", "text": text} for text in _PROBE[:2]]
        try:
            text = self._render([{"role": "user", "content": parts}], None)
        except Exception:  # it takes text alone
            text = ""
        between = (
            text.partition(_PROBE[0])[2].partition(_PROBE[1])[0] if _PROBE[1] in text else "\n"
        )
        return "\n" if between.strip() else between

    def _find_tool_form(self, where: str) -> tuple[bool, Any]:
        """Whether arguments are text to this template, and what stands for no content.

        Templates differ, and most do not fail on the form that is not theirs: they write Python's
        brackets, JSON inside of JSON, or leave the call out. So each form is tried.
        """
        name, key, value = _PROBE
        question = {"role": "user", "content": "q"}
        for as_text in (False, True):
            for empty in ("", None):
                function = {
                    "name": name,
                    "arguments": json.dumps({key: value}) if as_text else {key: value},
                }
                call = {"id": "probe0000", "type": "function", "function": function}
                answer = {"role": "assistant", "content": empty, "tool_calls": [call]}
                try:
                    before = self._render([question], None, prompt=True)
                    text = self._render([question, answer], None)[len(before) :]
                except Exception:  # not the form of this template
                    continue
                written = name in text and key in text and value in text
                if written and f"{{'{key}'" not in text and f'\\"{key}' not in text:
                    return as_text, empty
        raise DataError(
            f"{where}: the chat template writes no tool calls. Set data.chat.template to one that does, or leave "
            f"conversations with calls out."
        )


def chat_template_of(config: Config) -> ChatTemplate | None:
    """The chat template of a configuration that trains on conversations, else None. Raises
    ConfigError."""
    return ChatTemplate(config.data.chat, tokenizer_of(config)) if config.data.is_chat else None


def with_date(config: Config) -> Config:
    """``config`` with today as the date that its chat template writes, if it writes one and none is
    given.

    It would otherwise make other text of the same conversations tomorrow. Raises as
    ``stored_template``.
    """
    chat = config.data.chat
    if (
        chat.date is None
        and config.data.is_chat
        and "strftime_now" in stored_template(chat, tokenizer_of(config))
    ):
        chat = replace(chat, date=date.today().isoformat())
    return replace(config, data=replace(config.data, chat=chat))
