"""Published tokenizers and the chat templates that are stored with them (``make test-tokenizers``)."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from automoe.config.data_schema import ChatConfig
from automoe.data.chat import Conversation
from automoe.data.chat_template import ChatTemplate, Sample
from automoe.errors import DataError
from tests.support.chat import messages
from tests.tokenizers.fetch import NAMES, directory

pytestmark = pytest.mark.tokenizers

STOPS = {
    "qwen3": "<|im_end|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "qwen2_5": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "mistral_nemo": "</s>",
}
SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = messages("What is 2 + 2?", "It is 4.\n\nNothing else.", "Und 3 + 3? 🙂", "Sechs — 六。")
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "a factor"}},
            "required": ["a"],
        },
    },
}


@cache
def template(name: str, **args: Any) -> ChatTemplate:
    return ChatTemplate(ChatConfig(template_args=dict(args)), str(directory(name)))


@cache
def published(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory(name))


def samples(name: str, turns: list[dict[str, Any]], tools: Any = None) -> list[Sample]:
    return template(name).samples([Conversation(turns, tools, Path("a.jsonl"), 0, 1)])[0]


def check(name: str, turns: list[dict[str, Any]], tools: Any = None) -> list[str]:
    """The answers' texts as they are trained; prompts and stop tokens are checked against ``transformers``."""
    found = [(sample, span) for sample in samples(name, turns, tools) for span in sample.spans]
    answers = [n for n, message in enumerate(turns) if message["role"] == "assistant"]
    tokenizer, texts = published(name), []
    for n, (sample, (start, end)) in zip(answers, found, strict=True):
        assert sample.ids[:start] == template(name).prompt(turns[:n], tools)
        if not any(message.get("tool_calls") for message in turns[:n]):  # it drops content that is null
            given = tokenizer.apply_chat_template(turns[:n], tools=tools, add_generation_prompt=True, return_dict=False)
            assert sample.ids[:start] == list(given), "not one token of the prompt is trained"
        texts.append(tokenizer.decode(sample.ids[start:end]))
        assert texts[-1].endswith(STOPS[name]) and texts[-1].count(STOPS[name]) == 1
        assert len(sample.ids) == sample.spans[-1][1]
    return texts


@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_trained_to_their_stop_token_and_prompts_are_those_of_inference(name: str, system: bool) -> None:
    texts = check(name, [SYSTEM, *PLAIN] if system else PLAIN)
    frame = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert texts == [frame + PLAIN[n]["content"] + STOPS[name] for n in (1, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_begins_with_line_ends_is_no_part_of_the_prompt(name: str) -> None:
    [text] = check(name, messages("2+2?", "\n\n\n  4"))
    assert text.removesuffix(STOPS[name]).endswith("4")


def test_reasoning_is_trained_where_it_was_generated_and_gone_from_later_prompts() -> None:
    thinking = [PLAIN[0], PLAIN[1] | {"reasoning_content": "Two twos."}, *PLAIN[2:]]
    first, second = samples("qwen3", thinking)
    assert "Two twos." in published("qwen3").decode(first.ids)
    assert "Two twos." not in published("qwen3").decode(second.ids)
    assert len(samples("deepseek_v3", PLAIN)) == len(samples("qwen2_5", PLAIN)) == 1


def test_thinking_switched_off_is_a_part_of_the_prompt() -> None:
    quiet = template("qwen3", enable_thinking=False)
    [sample] = quiet.samples([Conversation(PLAIN[:2], None, Path("a.jsonl"), 0, 1)])[0]
    start, end = sample.spans[0]
    assert quiet.decode(sample.ids[:start]).endswith("assistant\n<think>\n\n</think>\n\n")
    assert quiet.decode(sample.ids[start:end]) == PLAIN[1]["content"] + "<|im_end|>"


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'], ids=["object", "text"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama3_1"])
def test_tool_calls_and_answers_to_their_results(name: str, arguments: Any) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "multiply", "arguments": arguments}}
    turns = [
        PLAIN[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "tool_call_id": "abcdefghi", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    tools = [TOOL]
    texts = [
        published(name).decode(sample.ids[start:end])
        for sample in samples(name, turns, tools)
        for start, end in sample.spans
    ]
    assert "multiply" in texts[0] and json.dumps({"a": 2}) in texts[0]
    assert texts[1].endswith("It is 4." + STOPS[name]) and "multiply" not in texts[1]
    assert all(text.endswith(STOPS[name]) for text in texts)


def test_a_template_without_tool_calls_says_so() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "multiply", "arguments": {"a": 2}}}
    with pytest.raises(DataError, match="writes no tool calls"):
        samples("llama3_1", [PLAIN[0], {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_spans_do_not_overlap() -> None:
    for name in NAMES:
        for sample in samples(name, PLAIN * 2):
            assert all(before[1] <= after[0] for before, after in pairwise(sample.spans))
