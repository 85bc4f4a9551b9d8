"""Conversations out of files: messages, ShareGPT and Alpaca records, pairs of answers of which one
is preferred; and questions about this Python's own library."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.data.corpora import jsonl_records, parquet_records
from automoe.errors import DataError, listed

Message = dict[str, Any]

_KEYS = {  # what we call a thing -> what it is called in a record of each format
    "messages": {"messages": "messages", "role": "role", "content": "content", "tools": "tools"},
    "sharegpt": {
        "messages": "conversations",
        "role": "from",
        "content": "value",
        "tools": "tools",
        "system": "system",
    },
    "alpaca": {
        "instruction": "instruction",
        "input": "input",
        "output": "output",
        "system": "system",
    },
}
WANTED = ("weight", "train", "training")  # of a message: 0 or false leaves the answer out
_PAIR_KEYS = {name: name for name in ("prompt", "chosen", "rejected", "system")}
_ROLES = {
    name: name
    for name in ("system", "developer", "user", "assistant", "tool", "function", "ipython")
}
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
}
_SHAREGPT_ROLES |= {"function_response": "tool", "function_call": "function_call"}


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that chat templates take, and where they stand.

    ``prompt`` counts the first messages that are not trained, of a pair those that both of its
    conversations have.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    path: Path
    file: int  # index in the corpus's list of files
    line: int  # 1-based line or row
    prompt: int = 0

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def num_bytes(message: Message) -> int:
    """Of a message's text, in UTF-8."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return sum(len(text.encode()) for text in texts)


def read_conversations(data: DataConfig, paths: Iterable[Path]) -> Iterator[Conversation]:
    """Every conversation in order, up to ``data.max_bytes`` of their contents; of a pair the
    preferred one comes first.

    Raises:
        DataError: with file and line: bad UTF-8, malformed JSON, a missing key, an unknown role, a
            content that is not text; an empty or unreadable file.
    """
    left = data.max_bytes
    some = False
    for index, path in enumerate(paths):
        found = False
        try:
            for line, record in _records(path, data):
                found = True
                reader = _Reader(data.chat, f"{path}:{line}", data.is_preference)
                conversations, prompt = (
                    reader.read_pair(record) if data.is_preference else ([reader.read(record)], 0)
                )
                if left is not None:
                    left -= sum(
                        num_bytes(message) for messages in conversations for message in messages
                    )
                    if left < 0 and not some:
                        raise DataError(
                            f"{path}:{line}: data.max_bytes={data.max_bytes} leaves nothing of the first conversation. "
                            "Raise it"
                        )
                    if left < 0:
                        return
                some = True
                tools = reader.tools(record)
                for messages in conversations:
                    yield Conversation(messages, tools, path, index, line, prompt)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror or error}). Check the file."
            ) from error
        if not found and data.path is not None:
            raise DataError(
                f"{path}: the file is empty. Remove it from data.path, or write it again."
            )


def _records(path: Path, data: DataConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    if data.kind.startswith("stdlib"):
        records = _docstring_records(path)
        yield from _shouted(records) if data.is_preference else records
    elif path.suffix in (".parquet", ".arrow"):
        for row, record in parquet_records(path):
            yield row, _without_nulls(record)
    else:
        yield from jsonl_records(path)


def _without_nulls(value: Any) -> Any:
    """A column of structs has every key in every row; null stands for one that a message never
    had."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


class _Reader:
    """One record as messages and tools; every error names its place."""

    def __init__(self, chat: ChatConfig, where: str, pairs: bool = False) -> None:
        self.chat = chat
        self.where = where
        self.formats = "messages or sharegpt" if pairs else ", ".join(_KEYS)
        self.keys = _KEYS[chat.format] | (_PAIR_KEYS if pairs else {}) | (chat.keys or {})
        self.roles = (
            _ROLES | (_SHAREGPT_ROLES if chat.format == "sharegpt" else {}) | (chat.roles or {})
        )

    def read(self, record: dict[str, Any]) -> list[Message]:
        if self.chat.format == "alpaca":
            messages = self._instruction(record)
        else:
            messages = [self._message(one, n) for n, one in enumerate(self._list(record), start=1)]
        return self._checked([*self._system(record, messages), *messages])

    def read_pair(self, record: dict[str, Any]) -> tuple[list[list[Message]], int]:
        """The conversation with the preferred answer and the one with the other, and how many
        messages they share.

        Messages before the answers are in ``prompt``, or both answers' columns begin with them;
        text is a question.
        """
        answers = [self._turns(record, key) for key in ("chosen", "rejected")]
        prompt = self._turns(record, "prompt", "user") if self.keys["prompt"] in record else None
        if whole := all(answer[0]["role"] != "assistant" for answer in answers):
            if prompt is not None and not isinstance(record[self.keys["prompt"]], str):
                raise self._wrong(
                    "there is a prompt, and what follows it begins with no answer",
                    "Leave one of them out",
                )
            shortest = min(map(len, answers)) - 1
            same = (n for n in range(shortest) if answers[0][n] != answers[1][n])
            shared = next(same, shortest)
            prompt = answers[0][:shared]
            answers = [answer[shared:] for answer in answers]
        if prompt is None:
            self._value(record, "prompt")
        for key, answer in zip(("chosen", "rejected"), answers, strict=True):
            if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
                where = f"behind the {len(prompt or ())} messages that both share " if whole else ""
                raise self._wrong(
                    f"{self.keys[key]!r} {where}is no answer: it begins or ends with "
                    f"{answer[0]['role']!r}, {answer[-1]['role']!r}",
                    "Both end in an assistant message",
                )
        before = [*self._system(record, prompt or []), *(prompt or ())]
        return [self._checked(before + answer) for answer in answers], len(before)

    def _turns(self, record: dict[str, Any], key: str, role: str = "assistant") -> list[Message]:
        """The messages of a column; one of ``role`` where it is text."""
        value = self._value(record, key)
        name = self.keys[key]
        parsed = self._parsed(value)
        if isinstance(parsed, dict):
            parsed = [parsed]
        if not isinstance(value, str) or _are_messages(parsed, self.keys["role"]):
            reader = _Reader(self.chat, f"{self.where}: {name}", pairs=True)
            if not isinstance(parsed, list) or not parsed:
                raise self._wrong(
                    f"{name!r} is {parsed!r:.40} where text or messages are needed", "Correct it"
                )
            return [reader._message(one, n) for n, one in enumerate(parsed, start=1)]
        return [{"role": role, "content": value}]

    def _system(self, record: dict[str, Any], messages: list[Message]) -> list[Message]:
        """What stands in a column of its own."""
        system = record.get(self.keys.get("system", ""))
        if system and any(message["role"] == "system" for message in messages):
            rule = f"a system prompt in {self.keys['system']!r} and another one among the messages"
            raise self._wrong(rule, "Leave one of them out")
        return (
            [{"role": "system", "content": self._content(system, self.keys["system"])}]
            if system
            else []
        )

    def _checked(self, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise self._wrong(
                f"half of a surrogate pair (\\u{ord(error.object[error.start]):04x}), which is not text",
                "Correct the escape",
            ) from error
        return value

    def _instruction(self, record: dict[str, Any]) -> list[Message]:
        if record.get("history"):
            raise self._wrong(
                "'history' is not read, and would be left out", "Write the record as messages"
            )
        question = self._text(self._value(record, "instruction"), self.keys["instruction"])
        if more := record.get(self.keys["input"]):
            question += "\n\n" + self._text(more, self.keys["input"])
        answer = self._text(self._value(record, "output"), self.keys["output"])
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def _list(self, record: dict[str, Any]) -> list[Any]:
        messages = self._parsed(self._value(record, "messages"))
        if not isinstance(messages, list) or not messages:
            kind = "an empty list" if messages == [] else type(messages).__name__
            raise self._wrong(
                f"{self.keys['messages']!r} is {kind} where a list of messages is needed",
                "Correct it",
            )
        return messages

    def _message(self, raw: Any, number: int) -> Message:
        if not isinstance(raw, dict):
            raise self._wrong(
                f"message {number} is {type(raw).__name__} where an object is needed", "Correct it"
            )
        # Some templates take calls that are null, or an empty list, for calls.
        raw = {
            key: value
            for key, value in raw.items()
            if value is not None and (key, value) != ("tool_calls", [])
        }
        name = self._value(raw, "role", f"message {number}: ")
        role = self.roles.get(name) if isinstance(name, str) else None
        if role is None:
            raise self._wrong(
                f"message {number} has the role {name!r}, and known are {listed(self.roles, 20)}",
                f"Set data.chat.roles={{{name}: user}}, or whatever it stands for",
            )
        own = {"role", "content", self.keys["role"], self.keys["content"]}
        message: Message = {"role": role} | {
            key: value for key, value in raw.items() if key not in own
        }
        for key in set(WANTED) & message.keys():
            if message[key] not in (0, 1):  # True and False are
                rule = f"message {number} has {key}: {message[key]!r:.40}, and an answer is trained (1) or not (0)"
                raise self._wrong(rule, "Correct it or leave it out")
        content = raw.get(self.keys["content"])
        if role == "function_call":  # ShareGPT: a JSON object where the text would stand
            call = self._parsed(content)
            if not isinstance(call, dict) or "name" not in call:
                raise self._wrong(
                    f"message {number} is no call with a name and arguments", "Correct it"
                )
            return {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            }
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            self._value(raw, "content", f"message {number}: ")
        message["content"] = (
            "" if content is None else self._content(content, f"message {number}'s content")
        )
        return message

    def tools(self, record: dict[str, Any]) -> list[dict[str, Any]] | None:
        tools = self._parsed(record.get(self.keys.get("tools", "tools")))
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise self._wrong("tools are no list of objects", "Write them as JSON schemas")
        return self._checked(tools)

    def _parsed(self, value: Any) -> Any:
        """What a column of parquet holds as JSON text, since its rows would need one schema."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value

    def _value(self, record: dict[str, Any], key: str, of: str = "") -> Any:
        name = self.keys[key]
        if name not in record:
            raise self._wrong(
                f"{of}no key {name!r}; there is {listed(record, 10) or 'none'} (data.chat.format={self.chat.format})",
                f"Set data.chat.format ({self.formats}), or data.chat.keys={{{key}: NAME}}",
            )
        return record[name]

    def _content(self, value: Any, what: str) -> str | list[dict[str, str]]:
        """A message's text; where it is in several parts, these: how they are joined is the chat
        template's to say."""
        if not isinstance(value, list):
            return self._text(value, what)
        if not value:
            raise self._wrong(f"{what} is an empty list", "Correct it or remove the line")
        for number, part in enumerate(value, start=1):
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                rule = f"part {number} of {what} is of type {kind!r}, and text alone is trained"
                raise self._wrong(rule, "Remove the part or the line")
            self._text(part.get("text"), f"part {number} of {what}")
        texts = [part["text"] for part in value]
        return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]

    def _text(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            raise self._wrong(
                f"{what} is {type(value).__name__} where text is needed",
                "Correct it or remove the line",
            )
        return value

    def _wrong(self, what: str, remedy: str) -> DataError:
        return DataError(f"{self.where}: {what}. {remedy}.")


def _are_messages(value: Any, role: str) -> bool:
    """Whether text that was JSON is meant as messages, and not an answer that happens to be
    JSON."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and role in one for one in value)
    )


def _shouted(records: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each question with its answer, which is preferred, and with the same in capitals."""
    for line, record in records:
        question, answer = record["messages"]
        yield (
            line,
            {"prompt": [question], "chosen": [answer], "rejected": answer["content"].upper()},
        )


def _docstring_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """A question for each public function and class of a library module; the answer is its
    docstring's first words."""
    tree = ast.parse(path.read_bytes())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            answer = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if 20 <= len(answer) <= 160:
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                question = f"What is the {kind} {path.stem}.{node.name} for?"
                pair = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
                yield node.lineno, {"messages": pair}
