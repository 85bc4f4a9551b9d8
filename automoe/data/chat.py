"""Conversations read from files: messages, prompts with completions, ShareGPT, Alpaca, preferences.

A preference pair is a prompt with a preferred and a rejected answer. For the kinds ``stdlib_chat``
and ``stdlib_preference`` this module makes questions and answers from the docstrings of Python's
standard library.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automoe.config.data_schema import TEMPLATE_NAMES, ChatConfig, DataConfig
from automoe.data.corpora import NumberedRecords, Record, jsonl_records, parquet_records, read_files
from automoe.errors import DataError, listed
from automoe.storage.foreign import check_depth

Message = Record


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# For each format: our name of a part -> its key in a record.
_KEYS = {
    "messages": _same("messages", "role", "content", "tools"),
    "sharegpt": {"messages": "conversations", "role": "from", "content": "value"}
    | _same("tools", "system"),
    "alpaca": _same("instruction", "input", "output", "system"),
}
_COMPLETION = _same("prompt", "completion")
_PAIR_KEYS = _same("prompt", "chosen", "rejected", "system")
_ARGS = "chat_template_kwargs"
SWITCHES = ("enable_thinking", "thinking")  # arguments of published templates for reasoning
# Keys of a message; 0 or false at one of them leaves the answer out of training.
WANTED = ("weight", "train", "training")
_ROLES = _same("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}


@dataclass(frozen=True)
class Conversation:
    """One conversation to train on, its messages in the form that chat templates take.

    Attributes:
        tools: JSON schemas of the tools that the model may call; None if there are none.
        path, line: file of the corpus, and 1-based line or row in it.
        file: index of ``path`` in the corpus's list of files.
        prompt: number of leading messages that are not trained; in a preference pair, the messages
            that both of its conversations share.
        args: arguments for the chat template from the record; they override
            ``data.chat.template_args``.
    """

    messages: list[Message]
    tools: list[Record] | None
    path: Path
    file: int
    line: int
    prompt: int = 0
    args: Record = field(default_factory=dict)

    @property
    def where(self) -> str:
        """``file:line`` of the conversation, for an error message."""
        return f"{self.path}:{self.line}"


def num_bytes(message: Message) -> int:
    """Return the number of UTF-8 bytes of a message's text."""
    return len(_text_of(message).encode())


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _says(prompt: str, message: Message) -> bool:
    """Return True if ``prompt`` contains the message's text, or the text contains ``prompt``.

    White space may differ. If the message has no text, return False.
    """
    first, second = (" ".join(text.split()) for text in (prompt, _text_of(message)))
    return bool(second) and (first in second or second in first)


def read_conversations(data: DataConfig, paths: Iterable[Path]) -> Iterator[Conversation]:
    """Yield every conversation in order, up to ``data.max_bytes`` of message texts.

    A preference pair yields two conversations, the preferred one first.

    Args:
        data: settings of one source: the format of its records, and names of their keys and roles.
        paths: files to read.

    Raises:
        DataError: the text of a file is malformed (bad UTF-8 or JSON, a missing key, an unknown
            role, a content that is not text), or a file is empty or cannot be read. The message
            names file and line.
    """
    left = data.max_bytes
    records = read_files(paths, lambda path: _records(path, data), data.path is None)
    for file, path, line, record in records:
        reader = _Reader(data.chat, f"{path}:{line}", data.is_preference)
        conversations, prompt = reader.read(record)
        if left is not None:
            left -= sum(num_bytes(message) for messages in conversations for message in messages)
            if left < 0:
                return
        tools = reader.tools(record)
        args = reader.args(record)
        for messages in conversations:
            yield Conversation(messages, tools, path, file, line, prompt, args)


def _records(path: Path, data: DataConfig) -> NumberedRecords:
    if data.kind.startswith("stdlib"):
        yield from _docstring_records(path, data.is_preference)
    else:
        table = path.suffix in (".parquet", ".arrow")
        for line, record in parquet_records(path) if table else jsonl_records(path):
            yield line, _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null, at any depth.

    Parquet columns of structs, and JSON lines that ``datasets`` writes, have every key in every
    row; null stands for a missing key.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@dataclass
class _Reader:
    """Converter of one record of a data file to messages.

    For a malformed record, methods raise ``DataError``, which names file and line.

    Attributes:
        chat: ``data.chat``, which names the record's keys.
        where: ``file:line`` of the record.
        pairs: True if records hold a preferred and a rejected answer.
    """

    chat: ChatConfig
    where: str
    pairs: bool

    def __post_init__(self) -> None:
        names = _PAIR_KEYS if self.pairs else _COMPLETION
        self.keys = _KEYS[self.chat.format] | names | (self.chat.keys or {})
        roles = _SHAREGPT_ROLES if self.chat.format == "sharegpt" else {}
        self.roles = _ROLES | roles | (self.chat.roles or {})

    def read(self, record: Record) -> tuple[list[list[Message]], int]:
        """Return a record's conversations, and how many leading messages of each are not trained.

        A record with a preference pair has two conversations, the preferred one first; any other
        record has one.
        """
        if self.pairs:
            return self._answers(record, ("chosen", "rejected"))
        if {self.keys[key] for key in _COMPLETION} <= record.keys():
            self.keys = _same("system") | self.keys
            return self._answers(record, ("completion",))
        if self.chat.format == "alpaca":
            if record.get("history"):
                raise self._wrong(
                    "'history' is not read, and would be left out", "Write the record as messages"
                )
            question = self._text(self._value(record, "instruction"), self.keys["instruction"])
            if more := record.get(self.keys["input"]):
                question += "\n\n" + self._text(more, self.keys["input"])
            answer = self._text(self._value(record, "output"), self.keys["output"])
            messages = _question(question, answer)
        else:
            parsed = _parsed(self._value(record, "messages"))
            if not isinstance(parsed, list) or not parsed:
                raise self._wrong(
                    f"{self.keys['messages']!r} is {parsed!r:.40} where a list of messages is needed"
                )
            messages = [self._message(message, n) for n, message in enumerate(parsed, start=1)]
        return [[*self._system(record, messages), *messages]], 0

    def _answers(self, record: Record, names: tuple[str, ...]) -> tuple[list[list[Message]], int]:
        """Return a conversation for each answer of a record, and the length of their common prompt.

        The prompt is the messages before the answer. It comes from the record's key ``prompt``,
        where plain text is a user's question. If both answers of a preference pair begin with
        another role than assistant, the prompt is instead the messages with which both begin; a
        text at ``prompt`` must then contain one of them, or be contained in one.

        Args:
            names: keys of the answers, e.g. ``("chosen", "rejected")``.

        Returns:
            (the conversations, number of messages in the prompt).
        """
        answers = [self._turns(record, key, "assistant") for key in names]
        where = ""
        if self.pairs and all(answer[0]["role"] != "assistant" for answer in answers):
            stated = record.get(self.keys["prompt"])
            if not isinstance(stated, str | None):
                raise self._wrong(
                    "there is a prompt, and the messages after it do not begin with an answer",
                    "Leave one of them out",
                )
            shortest = min(map(len, answers)) - 1
            differing = (n for n in range(shortest) if answers[0][n] != answers[1][n])
            shared = next(differing, shortest)
            prompt = answers[0][:shared]
            if prompt and stated and not any(_says(stated, message) for message in prompt):
                raise self._wrong(
                    f"the text at {self.keys['prompt']!r} is in none of the {shared} messages that both answers share",
                    "Leave it out, or set 'data.chat.keys={prompt: none}' to train without it",
                )
            answers = [answer[shared:] for answer in answers]
            where = f"after the {shared} messages that both share "
        else:
            prompt = self._turns(record, "prompt", "user")
            if prompt[-1]["role"] == "assistant" and not self.pairs:
                raise self._wrong(
                    f"{self.keys['prompt']!r} ends in an answer, and another one follows",
                    "Let it end in a question",
                )
        for key, answer in zip(names, answers, strict=True):
            if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
                raise self._wrong(
                    f"{self.keys[key]!r} {where}is not an answer: it begins or ends with "
                    f"{answer[0]['role']!r}, {answer[-1]['role']!r}",
                    "Each must end in an assistant message",
                )
        before = [*self._system(record, prompt), *prompt]
        return [before + answer for answer in answers], len(before)

    def _turns(self, record: Record, key: str, role: str) -> list[Message]:
        """Return the messages at a key of a record; plain text becomes one message.

        Args:
            key: automoe's name of the key, e.g. ``prompt``; ``data.chat.keys`` may map it to
                another.
            role: role of the message that plain text becomes, e.g. ``assistant``.
        """
        value = self._value(record, key)
        name = self.keys[key]
        parsed = _parsed(value)
        if isinstance(parsed, dict):
            parsed = [parsed]
        if isinstance(value, str) and not (
            isinstance(parsed, list)
            and parsed
            and all(isinstance(turn, dict) and self.keys["role"] in turn for turn in parsed)
        ):
            return [{"role": role, "content": value}]
        if not isinstance(parsed, list) or not parsed:
            raise self._wrong(f"{name!r} is {parsed!r:.40} where text or messages are needed")
        reader = _Reader(self.chat, f"{self.where}: {name}", self.pairs)
        return [reader._message(turn, n) for n, turn in enumerate(parsed, start=1)]

    def _system(self, record: Record, messages: list[Message]) -> list[Message]:
        """Return a record's system message, stored at a key of its own, as a list; [] if missing.

        Args:
            messages: the record's other messages.

        Raises:
            DataError: ``messages`` hold a system message too.
        """
        name = self.keys.get("system", "")
        system = record.get(name)
        if not system:
            return []
        if any(message["role"] == "system" for message in messages):
            raise self._wrong(
                f"there is a system prompt in {name!r} and another one among the messages",
                "Leave one of them out",
            )
        return [{"role": "system", "content": self._content(system, name)}]

    def _message(self, raw: Any, number: int) -> Message:
        if not isinstance(raw, dict):
            raise self._wrong(f"message {number} is {raw!r:.40} where an object is needed")
        # Some templates take tool calls that are null, or an empty list, for calls.
        raw = {
            key: value
            for key, value in raw.items()
            if value is not None and (key, value) != ("tool_calls", [])
        }
        name = self._value(raw, "role", f"message {number}: ")
        role = self.roles.get(name) if isinstance(name, str) else None
        if role is None:
            raise self._wrong(
                f"message {number} has the role {name!r}, and known roles are {listed(self.roles, 20)}",
                f"Set data.chat.roles={{{name}: user}}, or whatever it stands for",
            )
        read_keys = {"role", "content", self.keys["role"], self.keys["content"]}
        message = {"role": role} | {key: raw[key] for key in raw if key not in read_keys}
        for key in set(WANTED) & message.keys():
            if message[key] not in (0, 1):  # True equals 1, and False 0.
                raise self._wrong(
                    f"message {number} has {key}: {message[key]!r:.40}, and an answer is trained (1) or not (0)"
                )
        content = raw.get(self.keys["content"])
        if role == "function_call":  # ShareGPT writes a JSON object instead of text.
            call = _parsed(content)
            if not isinstance(call, dict) or "name" not in call:
                raise self._wrong(f"message {number} is not a call with a name and arguments")
            message = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
            content = None
        calls = message.get("tool_calls", [])
        if not are_functions(calls):
            raise self._wrong(f"message {number} has tool_calls that are not a list of functions")
        for call in calls:
            function = call.get("function", call)
            arguments = function.get("arguments", {})
            if not isinstance(_parsed(arguments), dict):
                raise self._wrong(
                    f"message {number} calls {function.get('name')!r} with arguments {arguments!r:.60}, which are not "
                    "an object or its JSON text; a call without arguments has {}"
                )
        if content is None and calls and message["role"] == "assistant":
            return message | {"content": ""}
        content = self._value(raw, "content", f"message {number}: ")
        return message | {"content": self._content(content, f"message {number}'s content")}

    def tools(self, record: Record) -> list[Record] | None:
        """Return the JSON schemas of the tools in a record; None if it has none."""
        tools = _parsed(record.get(self.keys.get("tools", "tools")))
        if not tools:
            return None
        if not are_functions(tools):
            raise self._wrong("tools are not a list of JSON schemas")
        return tools

    def args(self, record: Record) -> Record:
        """Return a record's ``chat_template_kwargs``, arguments of the template; {} if missing."""
        name = self.keys.get(_ARGS, _ARGS)
        args = _parsed(record.get(name, {}))
        if not isinstance(args, dict):
            raise self._wrong(f"{name!r} is {args!r:.40} where an object is needed")
        if taken := sorted(TEMPLATE_NAMES & args.keys()):
            raise self._wrong(f"{name!r} sets {', '.join(taken)}, which the trainer gives")
        for key in SWITCHES:
            if not isinstance(args.get(key, True), bool):
                raise self._wrong(f"{key} in {name!r} is {args[key]!r:.40}, neither true nor false")
        return args

    def _value(self, record: Record, key: str, of: str = "") -> Any:
        name = self.keys[key]
        if name not in record:
            formats = "messages or sharegpt" if self.pairs else ", ".join(_KEYS)
            raise self._wrong(
                f"{of}no key {name!r}; it has {listed(record, 10) or 'none'} (data.chat.format={self.chat.format})",
                f"Set data.chat.format ({formats}), or data.chat.keys={{{key}: NAME}}",
            )
        return record[name]

    def _content(self, value: Any, field: str) -> str | list[dict[str, str]]:
        """Return a message's text; a list of {"type": "text", ...} if it has several parts.

        The chat template joins such parts. Parts that are not text are refused.

        Args:
            value: content of the message: text, or a list of parts.
            field: name of the content, for an error.
        """
        if not isinstance(value, list):
            return self._text(value, field)
        texts = []
        for number, part in enumerate(value, start=1):
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise self._wrong(
                    f"part {number} of {field} is of type {kind!r}, and only text is trained"
                )
            texts.append(self._text(part.get("text"), f"part {number} of {field}"))
        if not texts:
            raise self._wrong(f"{field} is an empty list")
        return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]

    def _text(self, value: Any, field: str) -> str:
        if not isinstance(value, str):
            raise self._wrong(f"{field} is {type(value).__name__} where text is needed")
        return value

    def _wrong(self, problem: str, remedy: str = "Correct it or remove the line") -> DataError:
        return DataError(f"{self.where}: {problem}. {remedy}.")


def _parsed(value: Any) -> Any:
    """Parse JSON text; return anything else unchanged.

    Rows of a parquet column share one schema, so columns may hold objects as JSON text.
    """
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
        check_depth(parsed)
        return parsed
    except (ValueError, RecursionError):
        return value


def are_functions(value: Any) -> bool:
    """Return True if ``value`` can be a list of tool schemas or of tool calls.

    Each item must be an object; its key ``function``, if it has one, must hold an object.
    """
    return isinstance(value, list) and all(
        isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) for tool in value
    )


def _question(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _docstring_records(path: Path, pairs: bool) -> NumberedRecords:
    """Yield (line, record) for public functions and classes of a Python module with docstrings.

    The record asks what the function is for; the answer is the first paragraph of its docstring,
    which must have 20 to 160 characters. With ``pairs`` it also has a rejected answer, the same
    text in capitals.
    """
    tree = ast.parse(path.read_bytes())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            answer = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if 20 <= len(answer) <= 160:
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                messages = _question(f"What is the {kind} {path.stem}.{node.name} for?", answer)
                record = {"messages": messages}
                if pairs:
                    question, chosen = messages
                    record = {"prompt": [question], "chosen": [chosen], "rejected": answer.upper()}
                yield node.lineno, record
