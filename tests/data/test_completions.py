"""Prompts with completions, and a record's own template arguments, are read as TRL reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.data.chat import read_conversations
from automoe.data.chat_corpus import describe_chat, tokenise_chat
from automoe.data.chat_template import ChatTemplate
from automoe.data.corpora import find_files
from automoe.data.turns import Sample
from automoe.errors import DataError
from tests.support.chat import TEMPLATES, messages, save_tokenizer

# Qwen3.5: the generation prompt opens reasoning, or closes it at once where it is switched off.
SWITCH = TEMPLATES["chatml"].replace(
    "m.content +", "('<think>\\n' + (m.reasoning or '') + '\\n</think>\\n\\n' if m.role == 'assistant' else '') + m.content +"
).replace(
    "assistant\\n' }}",
    "assistant\\n<think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '') }}",
)  # fmt: skip
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


RECORDS = [
    {"prompt": messages("2+2?"), "completion": [answer("4")], **OFF},
    {"prompt": messages("3+3?", "6", "sure?"), "completion": [answer("yes", reasoning="6 is 6")]},
    {
        "prompt": messages("a"),
        "completion": [answer("b", reasoning="c")],
        "chat_template_kwargs": {"enable_thinking": True},
    },
]


def template_of(folder: Path, text: str = SWITCH, **chat: Any) -> ChatTemplate:
    save_tokenizer(folder, "chatml")
    (folder / "chat_template.jinja").write_text(text)
    return ChatTemplate(ChatConfig(**chat), str(folder))


def read(folder: Path, *records: Any, kind: str = "chat", **chat: Any) -> list[Any]:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(kind=kind, path=str(path), chat=ChatConfig(**chat))
    return list(read_conversations(data, find_files(data).values()))


def shown(template: ChatTemplate, samples: list[Sample]) -> list[tuple[str, list[str]]]:
    """Each sample's text, and what is trained of it."""
    return [
        (template.decode(one.ids), [template.decode(one.ids[start:end]) for start, end in one.spans]) for one in samples
    ]


def test_tokens_and_marks_are_those_of_trl(tmp_path: Path) -> None:
    """And its loss is the cross-entropy of these tokens, with config.json's balance loss on top."""
    from datasets import Dataset
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM
    from trl import SFTConfig, SFTTrainer

    template = template_of(tmp_path)
    ours = [one for [one] in template.samples(read(tmp_path, *RECORDS))]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=304, num_local_experts=4, num_key_value_heads=2, router_aux_loss_coef=0.25, **sizes
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    args = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=None,
        gradient_checkpointing=False, per_device_train_batch_size=len(RECORDS), disable_tqdm=True,
    )  # fmt: skip
    records = [{"chat_template_kwargs": {"enable_thinking": True}} | record for record in RECORDS]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    end = tokenizer.encode("\n")
    for number, (row, one) in enumerate(zip(trainer.train_dataset, ours, strict=True)):
        [(start, stop)] = one.spans
        assert stop == len(one.ids)
        assert tokenizer.decode(row["input_ids"]) == tokenizer.decode(one.ids) + "\n"  # TRL trains the line end too
        trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
        if number == 0:  # TRL warns: the prompt's last token is another one before the completion, which gets it
            assert tokenizer.decode(trained) == "\n\n" + tokenizer.decode(one.ids[start:]) + "\n"
            continue
        assert row["input_ids"] == one.ids + end and trained == one.ids[start:] + end
    inputs = next(iter(trainer.get_train_dataloader()))
    model.train()
    with torch.no_grad():
        total = trainer.compute_loss(model, dict(inputs))
        plain = model(
            **{key: inputs[key] for key in ("input_ids", "attention_mask", "labels")}, output_router_logits=True
        )
    torch.testing.assert_close(total, plain.loss, rtol=1e-5, atol=0)
    labels = inputs["labels"][:, 1:].flatten()
    cross = torch.nn.functional.cross_entropy(plain.logits[:, :-1].flatten(0, 1), labels, ignore_index=-100)
    torch.testing.assert_close(total, cross + 0.25 * plain.aux_loss, rtol=1e-5, atol=0)
    assert 0.25 * plain.aux_loss > 0.4


def test_a_completion_is_trained_alone_and_text_is_a_question_with_its_answer(tmp_path: Path) -> None:
    template = template_of(tmp_path, TEMPLATES["chatml"])
    asked = [{"role": "system", "content": "Be brief."}, *messages("1+1?", "2", "2+2?")]
    record = {"prompt": asked, "completion": [answer("4")]}
    for given, trained in (
        (record, ["4<|im_end|>"]),
        ({"system": "Be brief.", "prompt": "2+2?", "completion": '["4"]'}, ['["4"]<|im_end|>']),
        ({"question": "2+2?", "answer": answer("4")}, ["4<|im_end|>"]),
    ):
        keys = {"prompt": "question", "completion": "answer"} if "question" in given else None
        [sample] = shown(template, template.samples(read(tmp_path, given, keys=keys))[0])
        assert sample[1] == trained and "2+2?" in sample[0]
        assert ("Be brief." in sample[0]) == ("question" not in given)
    turns = {"prompt": [{"from": "human", "value": "2+2?"}], "completion": [{"from": "gpt", "value": "4"}]}
    [one] = read(tmp_path, turns, format="sharegpt")
    assert one.messages == messages("2+2?", "4") and one.prompt == 1
    for bad, rule in (
        ({"completion": messages("a")}, "'completion' is not an answer"),
        ({"completion": []}, r"'completion' is \[\] where text or messages are needed"),
        ({"completion": 4}, "'completion' is 4 where"),
        ({"prompt": [*asked, answer("4")]}, "'prompt' ends in an answer"),
    ):
        with pytest.raises(DataError, match=rf"a\.jsonl:2: {rule}"):
            read(tmp_path, record, record | bad)


def test_arguments_of_a_record_come_before_the_defaults(tmp_path: Path) -> None:
    template = template_of(tmp_path, template_args={"enable_thinking": False})
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    for kind, record in (("chat", {"messages": messages("2+2?", "4")}), ("preference", pair)):
        default, thinking = (
            [
                text
                for [one] in template.samples(read(tmp_path, record | more, kind=kind))
                for text in shown(template, [one])
            ]
            for more in ({}, on)
        )
        assert [trained for _, [trained] in default] == ["4<|im_end|>", "5<|im_end|>"][: len(default)]
        assert all("</think>" in trained for _, [trained] in thinking) and len(thinking) == len(default)
    stored = {"messages": messages("2+2?", "4"), "how": json.dumps(on["chat_template_kwargs"])}
    [one] = read(tmp_path, stored, keys={"chat_template_kwargs": "how"})
    assert one.args == {"enable_thinking": True}


def test_the_stop_token_is_that_of_the_arguments(tmp_path: Path) -> None:
    ends = TEMPLATES["chatml"].replace("'<|im_end|>\\n'", "('<|user|>' if end else '<|im_end|>') + '\\n'")
    template = template_of(tmp_path, ends)
    records = [{"messages": messages("a", "b", "c", "d"), "chat_template_kwargs": {"end": end}} for end in (0, 1, 0)]
    found = [shown(template, one)[0][1] for one in template.samples(read(tmp_path, *records))]
    assert found == [["b<|im_end|>", "d<|im_end|>"], ["b<|user|>", "d<|user|>"], ["b<|im_end|>", "d<|im_end|>"]]


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        (["enable_thinking"], r"'chat_template_kwargs' is \['enable_thinking'\] where an object is needed"),
        ("no", "'chat_template_kwargs' is 'no' where an object"),
        ({"enable_thinking": "false"}, "enable_thinking in 'chat_template_kwargs' is 'false', neither true nor false"),
        ({"tools": 3, "messages": []}, "'chat_template_kwargs' sets messages, tools, which the trainer gives"),
        ({"thinking": 0}, "thinking in 'chat_template_kwargs' is 0, neither"),
        ({"name": "\ud800"}, ".*surrogates not allowed"),
    ],
)
def test_bad_arguments_name_their_line(tmp_path: Path, args: Any, rule: str) -> None:
    for kind, record in (("chat", RECORDS[1]), ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"})):
        with pytest.raises(DataError, match=rf"a\.jsonl:2: {rule}"):
            read(tmp_path, record, record | {"chat_template_kwargs": args}, kind=kind)


def test_an_argument_that_the_template_does_not_name_is_said(tmp_path: Path) -> None:
    template = template_of(tmp_path)
    record = {"messages": [*messages("2+2?"), answer("4", reasoning="2, 2")]}
    typo = record | {"chat_template_kwargs": {"enable_thinkin": False}}
    facts = json.loads(json.dumps(tokenise_chat(tmp_path, read(tmp_path, record, typo), template, 310)))
    said = "\n".join(describe_chat(facts["chat"], 100, 1, "a{}.jsonl:{}".format))
    assert "leaves out 1 texts, tools or arguments of conversations, first a0.jsonl:2" in said
