"""Conversations as tokens: what is trained is what a model would generate, and its prompt is that of inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import automoe.data.chat_template
from automoe.config.compose import compose_config
from automoe.config.data_schema import ChatConfig
from automoe.config.frozen import dump_config
from automoe.data.chat import Conversation
from automoe.data.chat_corpus import describe_chat, tokenise_chat
from automoe.data.chat_template import ChatTemplate, Sample
from automoe.data.tokenizer import stored_template
from automoe.errors import ConfigError, DataError
from automoe.launch.prepare import settle
from tests.support.chat import TEMPLATES, messages, save_tokenizer

Load = Callable[..., ChatTemplate]


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Load:
    @cache
    def get(name: str, **chat: Any) -> ChatTemplate:
        folder = save_tokenizer(tmp_path_factory.mktemp("tokenizers") / name, name)
        return ChatTemplate(ChatConfig(**chat), str(folder))

    return get


def samples(template: ChatTemplate, turns: list[dict[str, Any]], tools: Any = None) -> list[Sample]:
    return template.samples([Conversation(turns, tools, Path("a.jsonl"), 0, 7)])[0]


def trained(template: ChatTemplate, sample: Sample) -> list[str]:
    return [template.decode(sample.ids[start:end]) for start, end in sample.spans]


FOUR = messages("2+2?", "4", "3+3?", "6")
ANSWERS = {
    "chatml": [["4<|im_end|>", "6<|im_end|>"]],
    "thinks": [["<think>\n\n</think>\n\n4<|im_end|>"], ["<think>\n\n</think>\n\n6<|im_end|>"]],
    "opens": [["4<|user|>", "6<|user|>"]],
    "moves": [[" 4<|endoftext|>", " 6<|endoftext|>"]],
    "prefills": [["4<|im_end|>", "6<|im_end|>"]],
    "returns": [["4<|endoftext|>"], ["6<|endoftext|>"]],
    "closes": [["4<|im_end|>", "6<|im_end|>"]],
    "signs": [["4<|im_end|>", "6<|im_end|>"]],
    "two": [["4<|tool|><|im_end|>", "6<|tool|><|im_end|>"]],
    "bare": [[" 4\n<|endoftext|>"], [" 6\n<|endoftext|>"]],
    "text_calls": [["4<|endoftext|>", "6<|endoftext|>"]],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_found_up_to_their_stop_token(load: Load, name: str) -> None:
    template = load(name)
    assert [trained(template, sample) for sample in samples(template, FOUR)] == ANSWERS[name]
    assert ANSWERS[name][0][0].endswith(template.decode([template.stop_id()]))


contents = st.text(st.sampled_from("ab \n<|>é❄"), min_size=1, max_size=6).filter(str.strip)
conversations = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)


@settings(max_examples=60)
@given(st.sampled_from(sorted(TEMPLATES)), conversations, st.booleans())
def test_a_prompt_is_that_of_inference_and_an_answer_is_trained_once(load, name: str, pairs, system: bool) -> None:
    """Whatever stands at the border: line ends that merge, blanks, the template's own signs."""
    template, turns = load(name), messages(*(text for pair in pairs for text in pair))
    if system:
        turns.insert(0, {"role": "system", "content": "Be brief."})
    answers = [n for n, message in enumerate(turns) if message["role"] == "assistant"]
    found = [(sample, span) for sample in samples(template, turns) for span in sample.spans]
    assert len(found) == len(answers)
    for n, (sample, (start, end)) in zip(answers, found, strict=True):
        prompt = template.prompt(turns[:n])
        if name == "prefills":  # the prompt of inference has more
            assert template.decode(prompt) == template.decode(sample.ids[:start]) + "<think>\n"
        else:
            assert sample.ids[:start] == prompt
        assert sample.ids[end - 1] in template._special and start < end <= len(sample.ids)
        assert turns[n]["content"].strip() in template.decode(sample.ids[start:end])
    assert all(sample.spans[-1][1] == len(sample.ids) for sample, _ in found), "nothing after the last stop token"


def test_what_merges_with_the_prompt_is_tokenised_apart(load: Load) -> None:
    template = load("chatml")
    [sample] = samples(template, messages("a", "\n\nb"))
    start = sample.spans[0][0]
    assert template.decode(sample.ids[start - 1 : start]) == "\n", "and not two of the three line ends"


def test_reasoning_is_trained_where_it_is_written(load: Load) -> None:
    template = load("thinks")
    turns = [*FOUR[:1], FOUR[1] | {"reasoning_content": "two twos"}, *FOUR[2:]]
    first, second = samples(template, turns)
    assert trained(template, first) == ["<think>\ntwo twos\n</think>\n\n4<|im_end|>"]
    assert "two twos" not in template.decode(second.ids), "the template drops it later"


def test_the_last_answer_alone(load: Load) -> None:
    template = load("thinks", turns="last")
    [sample] = samples(template, FOUR)
    assert trained(template, sample) == ["<think>\n\n</think>\n\n6<|im_end|>"]


def test_a_system_prompt_that_moves_is_where_inference_has_it(load: Load) -> None:
    template = load("moves")
    turns = [{"role": "system", "content": "Be brief."}, *FOUR]
    first, second = samples(template, turns)
    assert template.decode(first.ids) == "[INST]Be brief.\n\n2+2?[/INST] 4<|endoftext|>"
    assert (
        template.decode(second.ids) == "[INST]2+2?[/INST] 4<|endoftext|>[INST]Be brief.\n\n3+3?[/INST] 6<|endoftext|>"
    )
    assert trained(template, second) == [" 6<|endoftext|>"]


def call(arguments: Any, content: Any = "") -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    return [FOUR[0], answer, {"role": "tool", "content": "4"}, FOUR[1]]


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'], ids=["object", "text"])
@pytest.mark.parametrize("name", ["thinks", "text_calls"])
def test_calls_are_written_in_the_form_of_the_template(load: Load, name: str, arguments: Any) -> None:
    template = load(name)
    written = [text for sample in samples(template, call(arguments)) for text in trained(template, sample)]
    assert '<call>add{"a": 2}</call>' in written[0] and written[1].rpartition("</think>")[2].strip("\n")[0] == "4"


def test_calls_that_would_be_left_out_are_refused(load: Load) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:7: the chat template leaves out the call of 'add' in message 2"):
        samples(load("text_calls"), call({"a": 2}, content="I add."))
    with pytest.raises(DataError, match=r"a\.jsonl:7: the chat template writes no tool calls"):
        samples(load("chatml"), call({"a": 2}))


def test_a_conversation_without_an_answer_is_refused(load: Load) -> None:
    for turns in ([FOUR[0]], [FOUR[1]], [FOUR[1], FOUR[0]]):
        with pytest.raises(DataError, match=r"a\.jsonl:7: no token to train on.*Remove this line"):
            samples(load("chatml"), turns)


def test_a_template_that_refuses_names_the_line(load: Load, tmp_path: Path) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text("{{ raise_exception('roles must alternate') }}")
    template = load("chatml", template=str(strict))
    with pytest.raises(
        DataError, match=r"a\.jsonl:7: the chat template refuses .*roles must alternate.*data\.chat\.template"
    ):
        samples(template, FOUR)


def test_answers_that_are_marked_so_are_context(load: Load) -> None:
    for mark in ({"weight": 0}, {"train": False}):
        turns = [FOUR[0], FOUR[1] | mark, *FOUR[2:]]
        assert [trained(load("chatml"), sample) for sample in samples(load("chatml"), turns)] == [["6<|im_end|>"]]
        with pytest.raises(DataError, match=r"a\.jsonl:7: no token to train on"):
            samples(load("chatml"), turns[:2])


WRONG = {
    "": r"a\.jsonl:7: the chat template leaves out the text of message 2, the answer",
    TEMPLATES["chatml"].replace("m.content", "'x'"): r"leaves out the text of message 2",
    TEMPLATES["chatml"].replace("if add_generation_prompt", "if true"): r"begins another answer after the last one",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_template_that_would_train_something_else_is_refused(load: Load, tmp_path: Path, text: str) -> None:
    (tmp_path / "wrong.jinja").write_text(text)
    template = ChatTemplate(ChatConfig(template=str(tmp_path / "wrong.jinja")), load("chatml").tokenizer)
    with pytest.raises((ConfigError, DataError), match=WRONG[text]):
        samples(template, FOUR)


def test_questions_that_are_left_out_are_counted(load: Load, tmp_path: Path) -> None:
    (tmp_path / "deaf.jinja").write_text(
        TEMPLATES["chatml"].replace("in messages", "in messages if m.role != 'system'")
    )
    template = ChatTemplate(ChatConfig(template=str(tmp_path / "deaf.jinja")), load("chatml").tokenizer)
    turns = [{"role": "system", "content": "Be brief."}, *FOUR]
    assert [trained(template, sample) for sample in samples(template, turns)] == ANSWERS["chatml"]
    assert template.counts["left_out"] == 1


def test_no_template_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    chat, tokenizer = ChatConfig(), str(save_tokenizer(tmp_path, None))
    with pytest.raises(ConfigError, match=r"data\.chat\.template=None: the tokenizer .* has no chat template.*plain"):
        stored_template(chat, tokenizer)
    chat.template = str(tmp_path / "gone.jinja")
    with pytest.raises(ConfigError, match=r"the chat template cannot be read"):
        stored_template(chat, tokenizer)
    chat.template = "plain"
    template = ChatTemplate(chat, tokenizer)
    assert trained(template, samples(template, FOUR)[0]) == [" 4<|endoftext|>", " 6<|endoftext|>"]


def test_template_arguments_reach_the_template_and_its_digest(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "named.jinja"
    file.write_text(
        TEMPLATES["chatml"].replace("'assistant\\n'", "'assistant\\n'").replace("m.role +", "(name or '') + m.role +")
    )
    given = [
        ChatTemplate(ChatConfig(template=str(file), template_args={"name": name}), load("chatml").tokenizer)
        for name in "ab"
    ]
    assert [template.decode(template.prompt(FOUR[:1])).split("user")[0] for template in given] == [
        "<|im_start|>a",
        "<|im_start|>b",
    ]
    assert len({template.digest for template in (*given, load("chatml"), load("thinks"))}) == 4


def test_a_template_that_writes_the_date_writes_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tomorrow a run goes on with the text that it began with; a run that begins then has another one."""

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date(2031, 5, 17)

    folder, run_dir = save_tokenizer(tmp_path / "tokenizer", "chatml"), tmp_path / "run"
    path = folder / "chat_template.jinja"
    path.write_text("It is {{ strftime_now('%d %b %Y') }}.\n" + stored_template(ChatConfig(), str(folder)))
    typed = [f"data.tokenizer={folder}", f"run_dir={run_dir}", "data.chat.template=null"]
    config = settle(compose_config("sft_small", typed), typed)
    assert config.data.chat.date == date.today().isoformat()
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(config))

    monkeypatch.setattr(automoe.data.chat_template, "date", Tomorrow)
    again = settle(compose_config("sft_small", typed), typed)
    other = [*typed, "run_dir=other", f"checkpoint.resume={run_dir}"]
    assert settle(compose_config("sft_small", other), other).data.chat.date == config.data.chat.date
    new = settle(compose_config("sft_small", [*typed, "checkpoint.resume=never"]), typed)
    assert again == config and new.data.chat.date == "2031-05-17"
    first, second = (ChatTemplate(one.data.chat, str(folder)) for one in (config, new))
    assert first.digest == ChatTemplate(again.data.chat, str(folder)).digest != second.digest
    assert "It is 17 May 2031." in second.decode(second.prompt(messages("2+2?")))
    plain = settle(compose_config("sft_small", ["run_dir=none"]), [])
    assert plain.data.chat.date is None


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("chatml", "1: a\nb."),  # takes text alone
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}", None),
        ("{% for m in messages %}{% if m.content is string %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% else %}"
         "{% for p in m.content %}{{ p.text }}{{ '+' }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}", "1: a\nb."),
        ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
         "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}", "1: ab."),
    ],
)  # fmt: skip
def test_text_in_parts_is_joined_as_the_template_joins_it(tmp_path: Path, template: str, shown: str | None) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", "chatml")
    if template != "chatml":
        (folder / "chat_template.jinja").write_text(template)
    loaded = ChatTemplate(ChatConfig(), str(folder))
    parts = [{"type": "text", "text": text} for text in ("1: a", "b.")]
    if shown is None:
        assert loaded._joint == ""
        return
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    [sample] = samples(loaded, turns)
    assert loaded.decode(sample.ids).count(shown) == 2
    assert trained(loaded, sample) == [f"{shown}<|im_end|>"]


def test_empty_answers_are_counted_and_said(load: Load, tmp_path: Path) -> None:
    template = load("chatml")
    turns = [*messages("?", " ", "?", "", "?", "4"), {"role": "user", "content": "?"}]
    turns += [{"role": "assistant", "content": "", "weight": 0}]
    facts = tokenise_chat(tmp_path, [Conversation(turns, None, tmp_path, 0, 1)], template, 304)
    assert facts["chat"]["empty"] == 2
    said = describe_chat(facts["chat"], 20, 1, "file {} line {}".format)
    assert any("warning: 2 answers are empty" in line and "first file 0 line 1" in line for line in said)


def test_an_export_has_the_arguments_of_the_template_as_its_defaults(load: Load, tmp_path: Path) -> None:
    file, question = tmp_path / "own.jinja", messages("?")
    # Blanks before a block, and a first line end, are read as where nothing stands before them.
    own = "\n  {% if not of %}{{ mode | upper }} {{ of is none }} {% endif %}{{ 'thinks ' if thinks }}"
    file.write_text(own + TEMPLATES["chatml"])
    args = {"mode": 'a "b" é \U0001f600', "thinks": False, "of": None}
    template = ChatTemplate(ChatConfig(template=str(file), template_args=args), load("chatml").tokenizer)
    (tmp_path / "export.jinja").write_text(template.exported()["chat_template.jinja"])
    exported = ChatTemplate(ChatConfig(template=str(tmp_path / "export.jinja")), template.tokenizer)
    assert exported.prompt(question) == template.prompt(question)
    asked = replace(exported.chat, template_args={"thinks": True})
    assert "thinks" in exported.decode(ChatTemplate(asked, template.tokenizer).prompt(question))
    assert load("chatml").exported() == {}
    named = ChatTemplate(ChatConfig(template_args=args), template.tokenizer)
    assert named.exported()["chat_template.jinja"].endswith(TEMPLATES["chatml"])
    named._hf.chat_template = {"default": TEMPLATES["chatml"], "tool_use": own}
    assert named.exported().keys() == {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    assert all("set mode" in text for text in named.exported().values())
