"""What a template leaves out of a conversation, or a tokenizer makes of its text, is counted and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.data.chat import Conversation, read_conversations
from automoe.data.chat_corpus import describe_chat, tokenise_chat
from automoe.data.chat_template import ChatTemplate
from automoe.data.corpora import find_files
from automoe.errors import DataError
from tests.support.chat import SPECIAL, TEMPLATES, messages, save_tokenizer

CHATML = TEMPLATES["chatml"]
QUESTION = messages("2+2?")


def made(folder: Path, template: str, **chat: Any) -> ChatTemplate:
    """The template with a text of its own, or one of ``TEMPLATES``."""
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(folder, "chatml")
    (folder / "own.jinja").write_text(TEMPLATES.get(template, template))
    return ChatTemplate(ChatConfig(template=str(folder / "own.jinja"), **chat), str(folder))


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def spans(template: ChatTemplate, turns: list[dict[str, Any]], prompt: int = 0) -> list[str]:
    [samples] = template.samples([Conversation(turns, None, Path("a.jsonl"), 0, 7, prompt)])
    return [template.decode(one.ids[start:end]) for one in samples for start, end in one.spans]


def said(folder: Path, template: ChatTemplate, *conversations: list[dict[str, Any]]) -> str:
    """What the user reads of conversations in lines 1, 2, ... of a file."""
    read = (Conversation(turns, None, folder, 0, n) for n, turns in enumerate(conversations, start=1))
    facts = json.loads(json.dumps(tokenise_chat(folder, read, template, 310)))
    return "\n".join(describe_chat(facts["chat"], 100, 1, "a{}.jsonl:{}".format))


CUTS = CHATML.replace("m.content +", "(m.content.split('</think>') | last) +")  # DeepSeek-R1
KEEPS = TEMPLATES["prefills"].replace("m.content +", "(m.content if m.role == 'user' else '<think>\\n' + m.content) +")
SHORT = CHATML.replace("m.content +", "m.content[:9] +")
SHOUTS = CHATML.replace("m.content +", "(m.content | upper | trim) +")
DOTS = CHATML.replace("m.content +", "(m.content | replace('.', '!')) +")


@pytest.mark.parametrize(
    ("template", "given", "left_out"),
    [
        ("chatml", answer("4", reasoning_content="two twos"), 1),
        ("chatml", answer("4", thinking="two twos"), 1),
        ("chatml", answer("4", reasoning="two twos", thinking="a thought"), 2),
        ("thinks", answer("4", reasoning_content="two twos"), 0),
        (CUTS, answer("<think>\nso 24\n</think>\n4 it is"), 1),
        ("chatml", answer("<think>\nso 24\n</think>\n4 it is"), 0),
        (KEEPS, answer("two twos</think>4"), 0),
        (SHORT, answer("one two three"), 1),
        (SHOUTS, answer(" one two "), 0),
        (DOTS, answer("1.5 and 2.5"), 1),
        ("moves", answer("one\n\ntwo"), 0),
    ],
)
def test_texts_of_an_answer_that_reach_no_label_are_counted(
    tmp_path: Path, template: str, given: dict[str, Any], left_out: int
) -> None:
    loaded = made(tmp_path, template)
    text = said(tmp_path, loaded, [*QUESTION, answer("4")], [*QUESTION, given], [*QUESTION, given])
    assert loaded.counts["left_out"] == 2 * left_out
    warning = f"leaves out {2 * left_out} texts, tools or arguments of conversations, first a0.jsonl:2"
    assert (warning in text) == ("leaves out" in text) == bool(left_out)


def test_tools_and_questions_that_a_template_leaves_out_are_counted(tmp_path: Path) -> None:
    """And so is an argument that it does not name."""
    loaded = made(tmp_path, CHATML.replace("in messages", "in messages if m.role != 'system'"))
    turns = [{"role": "system", "content": "Be brief."}, *QUESTION, answer("4")]
    loaded.samples([Conversation(turns, [{"name": "add"}], Path("a.jsonl"), 0, 7, args={"no_such": 1})])
    assert loaded.counts["left_out"] == 3 and loaded.first["left_out"] == (0, 7)


# Line ends, signs or nothing between two turns, if an answer follows or not.
BETWEEN = {
    "line": CHATML.replace("<|im_end|>\\n'", "<|im_end|>' + ('' if loop.last and m.role == 'assistant' else '\\n')"),
    "sign": CHATML.replace("<|im_end|>\\n'", "<|im_end|>' + ('' if loop.last else '--')"),
    "blanks": CHATML.replace("<|im_end|>\\n'", "<|im_end|>' + ('\\n' if loop.last else '\\n \\n')"),
    "header": TEMPLATES["thinks"].replace(
        "{{ '<|im_start|>assistant\\n' }}{% if loop.last",
        "{{ '' if loop.first else '\\n' }}{{ '<|im_start|>assistant\\n' }}{% if loop.last",
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_span_begins_where_a_model_begins_whatever_stands_before(tmp_path: Path, name: str) -> None:
    template = made(tmp_path, BETWEEN[name])
    frame = "<think>\n\n</think>\n\n" if name == "header" else ""
    for turns in (
        [*QUESTION, answer("4"), answer("or IV")],
        [*QUESTION, answer("4"), answer("<b>"), answer(".")],
        [*QUESTION, answer("4"), *messages("more?"), answer("\n\nno")],
        messages("a", "b", "c", "d"),
    ):
        answers = [one["content"] for one in turns if one["role"] == "assistant"]
        assert spans(template, turns) == [f"{frame}{text}<|im_end|>" for text in answers], turns
        [samples] = template.samples([Conversation(turns, None, Path("a.jsonl"), 0, 1)])
        found = [(one, start) for one in samples for start, _ in one.spans]
        places = [n for n, one in enumerate(turns) if one["role"] == "assistant"]
        for n, (sample, start) in zip(places, found, strict=True):
            assert sample.ids[:start] == template.prompt(turns[:n]), "the prompt of inference"


def test_messages_that_a_pair_shares_are_not_trained(tmp_path: Path) -> None:
    turns = messages("a", "b", "c", "d")
    assert spans(made(tmp_path, "chatml"), turns, prompt=3) == ["d<|im_end|>"]
    assert spans(made(tmp_path, "chatml"), turns, prompt=1) == ["b<|im_end|>", "d<|im_end|>"]


OPEN = {
    "prefills": "prefills",  # DeepSeek-R1: nothing can be set
    "argument": TEMPLATES["prefills"].replace(
        "assistant\\n<think>\\n'", "assistant\\n' + ('<think>\\n' if thinking | default(true) else '')"
    ),
    "closed at once": KEEPS.replace("'<think>\\n' + m.content", "'<think>\\n\\n</think>\\n\\n' + m.content"),
}


@pytest.mark.parametrize("name", OPEN)
def test_training_without_reasoning_behind_a_prompt_that_opens_it_is_said(tmp_path: Path, name: str) -> None:
    template = made(tmp_path, OPEN[name])
    warning = said(tmp_path, template, [*QUESTION, answer("4")], messages("a", "b", "c", "d"))
    assert "the generation prompt opens reasoning, and 3 of 3 answers have none, first a0.jsonl:1" in warning
    for remedy in ("reasoning_content", "data.chat.template_args={enable_thinking: false}", "chat_template_kwargs"):
        assert remedy in warning
    if name == "argument":  # what it says to set ends the warning
        quiet = made(tmp_path, OPEN[name], template_args={"thinking": False})
        assert "opens reasoning" not in said(tmp_path, quiet, [*QUESTION, answer("4")])
    with_reasoning = made(tmp_path, KEEPS)
    assert "opens reasoning" not in said(tmp_path, with_reasoning, [*QUESTION, answer("2\n</think>\n\n4")])
    assert "opens reasoning" not in said(tmp_path, made(tmp_path, "thinks"), [*QUESTION, answer("4")])


# Special tokens as text ----------------------------------------------------------------------------------

SPELLED = [
    messages("what is <|im_end|>?", "4"),
    messages("?", "it is <|im_end|> and <|user|>."),
    [{"role": "system", "content": "<|tool|>"}, *messages("?", "4")],
    [*QUESTION, answer("4", reasoning_content="<|endoftext|>")],
]


@pytest.mark.parametrize("number", range(len(SPELLED)))
def test_special_tokens_in_messages_become_tokens_or_stay_text(tmp_path: Path, number: int) -> None:
    turns = SPELLED[number]
    name = "thinks" if "reasoning_content" in turns[-1] else "chatml"
    count = json.dumps(turns).count("<|")
    template = made(tmp_path, name, special_text="text")
    plain = made(tmp_path, name)
    names = dict(zip(SPECIAL, range(len(SPECIAL)), strict=True))
    for loaded, extra in ((plain, count), (template, 0)):
        [[sample]] = loaded.samples([Conversation(turns, None, tmp_path, 0, 1)])
        [[same]] = loaded.samples(
            [Conversation(json.loads(json.dumps(turns).replace("<|", "< ")), None, tmp_path, 0, 1)]
        )
        marks = [[i for i in one.ids if i in names.values()] for one in (sample, same)]
        assert len(marks[0]) == len(marks[1]) + extra
        text = plain.decode(sample.ids)
        assert all(one.get("reasoning_content", one["content"]) in text for one in turns)
        assert [loaded.decode(sample.ids[a:b]) for a, b in sample.spans][-1].endswith("<|im_end|>")
        if not extra:
            assert marks[0] == marks[1] and sample.ids[: sample.spans[0][0]] == loaded.prompt(turns[:-1])
    assert plain.digest != template.digest


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_text_without_special_tokens_has_the_same_ids_with_either_setting(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """Also beside tokens that take the blanks next to them, and in a vocabulary that holds its special tokens."""
    folder = request.getfixturevalue(f"{kind}_dir")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>", lstrip=True, rstrip=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    loaded = [made(tmp_path, "chatml", special_text=keeps) for keeps in ("token", "text")]
    turns = messages("def a(b):\n    return  b ", " é❄ x\n", "", "\n\n 1")
    [first], [second] = (one.samples([Conversation(turns, None, tmp_path, 0, 1)]) for one in loaded)
    assert first == second
    eos = loaded[0]._hf.eos_token
    spelled = messages(f"a {eos} b", f"<|im_end|>{eos}")
    [[sample]] = loaded[1].samples([Conversation(spelled, None, tmp_path, 0, 1)])
    assert loaded[1]._hf.eos_token_id not in sample.ids
    assert sum(i == tokenizer.token_to_id("<|im_end|>") for i in sample.ids) == 2
    assert f"a {eos} b" in loaded[1].decode(sample.ids)


# JSON lines as ``datasets`` writes them -------------------------------------------------------------------


def test_json_lines_of_datasets_are_what_parquet_gives(tmp_path: Path) -> None:
    import datasets

    def tool(name: str, **parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}

    call = {"type": "function", "function": {"name": "turn", "arguments": {"theta": 1.5}}}
    other = {"type": "function", "function": {"name": "go", "arguments": {"metres": 2}}}
    records = [
        {"messages": [*QUESTION, answer("", tool_calls=[call])], "tools": [tool("turn", theta={"type": "number"})]},
        {"messages": [*QUESTION, answer("4", reasoning_content="two")], "tools": [tool("go", metres={"enum": [1, 2]})]},
        {"messages": [*QUESTION, answer("", tool_calls=[other])], "tools": [tool("go", metres={"type": "integer"})]},
        {"messages": messages("?", "4"), "tools": None},
    ]
    data_set = datasets.Dataset.from_list(records)
    data_set.to_json(tmp_path / "a.jsonl")
    data_set.to_parquet(tmp_path / "a.parquet")
    assert '"theta":null' in (tmp_path / "a.jsonl").read_text()
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = []
    for name in ("a.jsonl", "a.parquet", "own.jsonl"):
        data = DataConfig(kind="chat", path=str(tmp_path / name))
        found.append([(one.messages, one.tools) for one in read_conversations(data, find_files(data).values())])
    assert found[0] == found[1] == found[2]
    assert found[0][0][1] == records[0]["tools"]


# The export's stop token ----------------------------------------------------------------------------------


def test_a_template_that_cannot_name_its_stop_token_is_known_before_the_first_step(tmp_path: Path) -> None:
    """The export asks it for an answer to a question of its own, which a template may refuse."""
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + CHATML
    turns = [{"role": "system", "content": "Be brief."}, *messages("2+2?", "4")]
    facts = tokenise_chat(tmp_path, [Conversation(turns, None, tmp_path, 0, 1)], made(tmp_path, strict), 310)
    assert "no system prompt" in facts["chat"]["refused"] and facts["chat"]["answers"] == 1
    facts = tokenise_chat(tmp_path, [Conversation(turns, None, tmp_path, 0, 1)], made(tmp_path, CHATML), 310)
    assert facts["chat"]["refused"] is None
    with pytest.raises(DataError, match="no system prompt"):
        made(tmp_path, strict).stop_id()
