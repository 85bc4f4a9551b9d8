"""Pairs of answers in files: formats, bad records, and rows in which both sequences of a pair lie together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from automoe.config.compose import compose_config
from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.config.schema import Config, TrainConfig
from automoe.config.validate import validate
from automoe.data.chat import read_conversations
from automoe.data.chat_corpus import describe_chat
from automoe.data.corpora import find_files
from automoe.data.loader import Loader
from automoe.data.packing import SampleRows
from automoe.errors import ConfigError, DataError
from tests.support.chat import messages, save_tokenizer
from tests.support.preference import write_pairs

ASKED, GOOD, BAD = messages("2+2?"), [{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]
PAIR = [ASKED + GOOD, ASKED + BAD]


def read(path: Path, *records: Any, **chat: Any) -> list[list[dict[str, Any]]]:
    """Both conversations of every record, which share their prompt alone."""
    if records:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(kind="preference", path=str(path), chat=ChatConfig(**chat))
    found = list(read_conversations(data, find_files(data).values()))
    assert all(one.messages[one.prompt]["role"] == "assistant" for one in found)
    assert all(a.messages[: a.prompt] == b.messages[: b.prompt] for a, b in zip(found[::2], found[1::2], strict=True))
    return [one.messages for one in found]


def test_what_trl_documents_and_what_people_have_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert read(file, {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}) == PAIR  # explicit prompt
    assert read(file, {"chosen": PAIR[0], "rejected": PAIR[1]}) == PAIR  # implicit
    assert read(file, {"prompt": "2+2?", "chosen": "4", "rejected": "5"}) == PAIR  # text
    assert read(file, {"prompt": "2+2?", "chosen": PAIR[0], "rejected": PAIR[1]}) == PAIR  # told twice
    told = {"prompt": "Human:  2+2?\n\nAssistant:", "chosen": PAIR[0], "rejected": PAIR[1]}
    assert read(file, told) == PAIR  # in another form
    assert read(file, told | {"prompt": "17"}, keys={"prompt": "none"}) == PAIR  # the record's number
    assert read(file, {"prompt": ASKED, "chosen": GOOD[0], "rejected": BAD[0]}) == PAIR  # single messages
    turns = {"conversations": [{"from": "human", "value": "2+2?"}]}
    turns |= {key: {"from": "gpt", "value": value} for key, value in (("chosen", "4"), ("rejected", "5"))}
    assert read(file, turns, format="sharegpt", keys={"prompt": "conversations"}) == PAIR
    question = {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"}
    system = [{"role": "system", "content": "Be brief."}]
    assert read(file, question, keys={"prompt": "question"}) == [system + one for one in PAIR]
    assert read(file, {"prompt": "2+2?", "chosen": '["4"]', "rejected": '{"a": 5}'})[0][1]["content"] == '["4"]'
    same = messages("2+2?", "4", "sure?", "4")
    assert read(file, {"chosen": same, "rejected": same})[1] == same  # of two that are the same the last message
    columns = {"prompt": [ASKED], "chosen": [json.dumps(GOOD)], "rejected": [json.dumps(BAD)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == PAIR
    with pytest.raises(DataError, match="files of 2 formats"):
        read(tmp_path)
    file.unlink()
    assert read(tmp_path) == PAIR  # a folder


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        ({"prompt": ASKED, "chosen": GOOD}, "no key 'rejected'; it has chosen, prompt"),
        ({"chosen": "4", "rejected": "5"}, "no key 'prompt'"),
        (
            {"prompt": ASKED, "chosen": PAIR[0], "rejected": PAIR[1]},
            "the messages after it do not begin with an answer",
        ),
        (
            {"prompt": "3+3?", "chosen": PAIR[0], "rejected": PAIR[1]},
            "the text at 'prompt' is in none of the 1 messages",
        ),
        ({"prompt": ASKED, "chosen": [], "rejected": BAD}, r"'chosen' is \[\] where text or messages are needed"),
        ({"prompt": ASKED, "chosen": 4, "rejected": BAD}, "'chosen' is 4 where"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": ASKED}, "'rejected' is not an answer: .* 'user'"),
        (
            {"chosen": PAIR[0], "rejected": messages("3+3?", "6")},
            "after the 0 messages that both share is not an answer",
        ),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": [{"role": "bot"}]}, "rejected: message 1 has the role 'bot'"),
        ({"prompt": "\ud800", "chosen": "4", "rejected": "5"}, "surrogates not allowed"),
    ],
)
def test_a_bad_record_names_its_line(tmp_path: Path, record: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{rule}"):
        read(tmp_path / "a.jsonl", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, record)


def test_both_sequences_of_a_pair_are_documents_of_one_row() -> None:
    lengths, firsts = np.array([6, 5, 4]), np.array([4, 2, 1])
    tokens = np.arange(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    rows = SampleRows(tokens, starts, lengths, trained=tokens >= 0, firsts=firsts, seq_len=11, seed=0, pad_id=99)
    taken = rows.take(np.arange(rows.num_rows))
    for row in range(rows.num_rows):
        for place, pair in enumerate(rows.row_documents(row)):
            for which, (start, length) in enumerate(((0, firsts[pair]), (firsts[pair], lengths[pair] - firsts[pair]))):
                here = taken.doc_ids[row] == 2 * place + which
                assert taken.tokens[row][here].tolist() == list(
                    range(starts[pair] + start, starts[pair] + start + length)
                )
                assert taken.positions[row][here].tolist() == list(range(length))


def config_of(tmp_path: Path, **data: Any) -> Config:
    save_tokenizer(tmp_path / "tokenizer", "chatml")
    data = {
        "kind": "preference",
        "on_long": "error",
        "val_fraction": 0.3,
        "tokenizer": str(tmp_path / "tokenizer"),
    } | data
    config = Config(recipe="dpo", data=DataConfig(**data), train=TrainConfig(seq_len=128, global_batch_size=4))
    return replace(config, model=replace(config.model, vocab_size=304))


def test_rows_know_their_pairs_and_a_prompt_is_on_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pairs(tmp_path / "a.jsonl", 20)
    lines = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(
        lines.replace('"chosen"', '"x"').replace('"rejected"', '"chosen"').replace('"x"', '"rejected"')
    )
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0} for name in "ab"]
    config = config_of(tmp_path)
    from automoe.config.data_schema import SourceConfig

    config.data.sources = [SourceConfig(**one) for one in sources]
    loader = Loader(config, 0, 1, pairs=True)
    assert loader.num_pairs == 40 and loader.where_pair(25).endswith("b.jsonl:6")
    seen: dict[str, list[int]] = {}
    for split in ("train", "validation"):
        seen[split] = []
        for batch in loader.every_pair(split):
            for row, numbers in enumerate(batch.pairs):
                numbers = numbers[numbers >= 0]
                assert batch.doc_ids[row].max() == 2 * len(numbers) - 1
                for place, number in enumerate(numbers.tolist()):
                    corpus, at = loader.corpora[number // 20], number % 20
                    here = (batch.doc_ids[row] // 2 == place) & (batch.doc_ids[row] >= 0)
                    start = corpus.starts[at]
                    assert (
                        batch.tokens[row][here].tolist() == corpus.tokens[start : start + corpus.lengths[at]].tolist()
                    )
            seen[split] += batch.pairs[batch.pairs >= 0].tolist()
    assert sorted(seen["train"] + seen["validation"]) == list(range(40)) and seen["validation"]
    assert {number % 20 for number in seen["train"]}.isdisjoint(number % 20 for number in seen["validation"])
    assert any("20 pairs of answers" in line for line in loader.describe())


def test_pairs_are_for_a_recipe_that_compares_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pairs(tmp_path / "a.jsonl", 4)
    config = config_of(tmp_path, path=str(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match="learns every answer it reads, rejected ones too"):
        Loader(config, 0, 1)
    for changed, rule in (
        (replace(config, recipe="finetune"), "rejected ones too.*recipe=dpo"),
        (replace(config, data=replace(config.data, on_long="truncate")), "without its end"),
        (replace(config, data=replace(config.data, document_mask=False)), "document_mask=true"),
        (replace(config, data=replace(config.data, chat=ChatConfig(format="alpaca"))), "chosen and rejected"),
    ):
        with pytest.raises(ConfigError, match=rule):
            validate(changed, 1, "cpu")
    with pytest.raises(ConfigError, match="compares two answers"):
        compose_and_check("recipe=dpo", "data=stdlib_chat")
    with pytest.raises(ConfigError, match=r"recipe_args\.beta.*larger than 0"):
        compose_and_check("recipe=dpo", "data=stdlib_preference", "recipe_args.beta=0")
    with pytest.raises(DataError, match=r"a\.jsonl:1: a pair of \d+ tokens does not fit"):
        Loader(replace(config, train=replace(config.train, seq_len=16)), 0, 1, pairs=True)


def compose_and_check(*overrides: str) -> None:
    validate(compose_config("sft_small", list(overrides)), 4, "cpu")


def test_answers_of_several_messages_and_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    long = messages("a", "b", "c", "d")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": long[:1], "chosen": long[1:], "rejected": long[1:2]}) + "\n")
    config = config_of(tmp_path, path=str(path), val_fraction=0.0)
    config.train.val_every = 0
    [batch] = Loader(config, 0, 1, pairs=True).every_pair("train")
    assert (batch.labels[0] >= 0).sum() == 3 * len("b<")  # b, d and b again, each with its stop token
    save_tokenizer(tmp_path / "tokenizer", "thinks")
    with pytest.raises(DataError, match=r"a\.jsonl:1: an answer of several messages.* 2 sequences"):
        Loader(config, 0, 1, pairs=True)
    counts = {"pairs": 3, "equal": 1, "answers": 6, "conversations": 3, "trained_tokens": 10, "rendered_tokens": 20}
    assert any("both answers are the same in 1 of " in line for line in describe_chat(counts, 20, 3, "{}:{}".format))


def test_pairs_that_are_all_left_out_say_how_long_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pairs(tmp_path / "a.jsonl", 20)
    config = config_of(tmp_path, path=str(tmp_path / "a.jsonl"), on_long="drop")
    config.train.seq_len = 8
    with pytest.raises(DataError, match=r"No pair of answers is left.* \(the shortest has \d\d tokens\)"):
        Loader(config, 0, 1, pairs=True)
