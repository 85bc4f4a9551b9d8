"""Conversations in files: formats, bad records, and what the loader makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from automoe.comm.tokens import IGNORE
from automoe.config.data_schema import ChatConfig, DataConfig, SourceConfig, sources_of
from automoe.config.hub import is_data_set
from automoe.config.schema import Config, TrainConfig
from automoe.config.validate import validate
from automoe.data.chat import Conversation, num_bytes, read_conversations
from automoe.data.chat_corpus import tokenise_chat
from automoe.data.chat_template import ChatTemplate
from automoe.data.corpora import find_files
from automoe.data.loader import Loader
from automoe.errors import ConfigError, DataError
from automoe.observe.sample_view import describe_row
from tests.support.chat import TEMPLATES, messages, save_tokenizer, write_chat

ASKED = messages("2+2?", "4")


def read(path: Path, **chat: Any) -> list[list[dict[str, Any]]]:
    data = DataConfig(kind="chat", path=str(path), chat=ChatConfig(**chat))
    return [one.messages for one in read_conversations(data, find_files(data).values())]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_three_formats_say_the_same(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    own = write(tmp_path / "own.jsonl", {"messages": [system, *ASKED]})
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    sharegpt = write(tmp_path / "sharegpt.jsonl", {"conversations": turns, "system": "Be brief."})
    alpaca = write(tmp_path / "alpaca.jsonl", {"instruction": "2+2?", "output": "4", "system": "Be brief."})
    assert read(own) == read(sharegpt, format="sharegpt") == read(alpaca, format="alpaca") == [[system, *ASKED]]
    twice = [{"from": "system", "value": "Be long."}, *turns]
    twice = write(tmp_path / "twice.jsonl", {"conversations": twice, "system": "Be brief."})
    with pytest.raises(DataError, match=r"twice.jsonl:1: there is a system prompt in 'system' and another one"):
        read(twice, format="sharegpt")
    more = write(tmp_path / "more.jsonl", {"instruction": "Add.", "input": "2+2", "output": "4"})
    assert read(more, format="alpaca")[0][0]["content"] == "Add.\n\n2+2"


def test_other_names_and_roles_are_mapped(tmp_path: Path) -> None:
    turns = [{"who": "me", "text": "2+2?"}, {"who": "bot", "text": "4"}]
    path = write(tmp_path / "a.jsonl", {"dialogue": turns})
    keys = {"messages": "dialogue", "role": "who", "content": "text"}
    assert read(path, keys=keys, roles={"me": "user", "bot": "assistant"}) == [ASKED]
    with pytest.raises(DataError, match=r"a\.jsonl:1: message 2 has the role 'bot'.*data\.chat\.roles=\{bot: user\}"):
        read(path, keys=keys, roles={"me": "user"})


def test_parquet_gives_what_json_lines_give(tmp_path: Path) -> None:
    """Rows of one schema: keys that a message never had are null, and lists may be JSON text."""
    call = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
    turns = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "4"}]
    table = pyarrow.table({"messages": [ASKED, turns], "tools": [None, json.dumps([{"name": "add"}])]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [ASKED, turns] == read(write_chat(tmp_path / "a.jsonl", [ASKED, turns]))
    pyarrow.parquet.write_table(pyarrow.table({"messages": [json.dumps(ASKED)]}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [ASKED]


@pytest.mark.parametrize("arguments", ["", [], '["a"]', '{"a": 2', "2", 2, '"a"'])
@pytest.mark.parametrize("kind", ["messages", "bare", "sharegpt"])
def test_arguments_that_are_no_object_are_refused_by_name(kind: str, arguments: Any, tmp_path: Path) -> None:
    call = {"name": "add", "arguments": arguments}
    answer = {"role": "assistant", "tool_calls": [{"function": call} if kind == "messages" else call]}
    record: dict[str, Any] = {"messages": [ASKED[0], answer]}
    if kind == "sharegpt":
        record = {
            "conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)}]
        }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    data = DataConfig(
        kind="chat", path=str(path), chat=ChatConfig(format="sharegpt" if kind == "sharegpt" else "messages")
    )
    with pytest.raises(
        DataError, match=rf"{path}:1: message 2 calls 'add' with arguments .*not an\s+object.*has \{{\}}"
    ):
        [*read_conversations(data, [path])]


def test_calls_of_sharegpt_are_tool_calls(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 2}}
    turns = [{"from": "human", "value": "?"}, {"from": "function_call", "value": json.dumps(call)}]
    [[_, answer]] = read(write(tmp_path / "a.jsonl", {"conversations": turns}), format="sharegpt")
    assert answer == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


BAD = {
    '{"messages": [': r"a\.jsonl:2: not valid JSON",
    '{"text": "x"}': r"a\.jsonl:2: no key 'messages'; it has text .*data\.chat\.keys=\{messages: NAME\}",
    '{"messages": []}': r"a\.jsonl:2: 'messages' is \[\] where a list of messages is needed",
    '{"messages": "hello"}': r"a\.jsonl:2: 'messages' is 'hello' where",
    '{"messages": ["hello"]}': r"a\.jsonl:2: message 1 is 'hello' where an object is needed",
    '{"messages": [{"role": "user"}]}': r"a\.jsonl:2: message 1: no key 'content'; it has role",
    '{"messages": [{"role": "user", "content": 3}]}': r"a\.jsonl:2: message 1's content is int where text is needed",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}': r"a\.jsonl:2: message 1 has weight: 0\.5, and",
    '{"messages": [{"role": "assistant", "content": "a", "train": "false"}]}': r"message 1 has train: 'false', and an",
    '{"messages": [{"role": "user", "content": []}]}': r"a\.jsonl:2: message 1's content is an empty list",
    '{"messages": [{"role": "user", "content": ["a"]}]}': r"a\.jsonl:2: part 1 of message 1's content is of type 'str'",
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]}': (
        r"a\.jsonl:2: part 2 of message 1's content is of type 'image_url', and only text is trained"
    ),
    '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}': r"part 1 of message 1's content is NoneType where",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': r"a\.jsonl:2: not valid JSON .*surrogates not allowed",
    '{"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "\\ud800"}]}': r"a\.jsonl:2: not valid JSON .*surrogates not allowed",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_record_names_its_line(tmp_path: Path, line: str) -> None:
    path = write_chat(tmp_path / "a.jsonl", [ASKED])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=BAD[line]):
        read(path)


def test_no_calls_are_no_calls(tmp_path: Path) -> None:
    path = write_chat(tmp_path / "a.jsonl", [[ASKED[0], ASKED[1] | {"tool_calls": empty}] for empty in ([], None)])
    assert read(path) == [ASKED, ASKED]  # some templates would write a call of nothing, and not the text


def test_a_history_is_not_left_out_and_what_no_template_reads_may_be_anything(tmp_path: Path) -> None:
    record = {"instruction": "2+2?", "output": "4"}
    assert read(write(tmp_path / "a.jsonl", record | {"history": []}), format="alpaca") == [ASKED]
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'history' is not read"):
        read(write(tmp_path / "a.jsonl", record | {"history": [["1+1?", "2"]]}), format="alpaca")
    stamped = [message | {"timestamp": datetime(2026, 1, 1), "raw": b"\xff"} for message in ASKED]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [stamped]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [stamped]
    template = ChatTemplate(ChatConfig(template="plain"), "byte")
    conversations = [Conversation(stamped, None, tmp_path, 0, 1)]
    assert tokenise_chat(tmp_path, conversations, template, 258)["chat"]["answers"] == 1


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": ASKED}).encode() + b"\r\n")
    assert read(tmp_path / "a.jsonl") == [ASKED]


def test_bad_utf8_and_empty_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"messages": []}\n\n{"messages": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'messages' is \[\] where"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(json.dumps({"messages": ASKED}).encode() + b'\n{"messages": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:2: byte 0xe9 is not UTF-8"):
        read(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").touch()
    with pytest.raises(DataError, match=r"c\.jsonl: the file is empty"):
        read(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match=r"no \*\.jsonl or \*\.parquet file in this directory"):
        (tmp_path / "none").mkdir()
        read(tmp_path / "none")


def test_a_limit_below_the_first_conversation_is_refused(tmp_path: Path, make: Make) -> None:
    path = write_chat(tmp_path / "a.parquet.jsonl", [ASKED, ASKED])  # JSON lines by its last ending
    data = DataConfig(kind="chat", path=str(path), max_bytes=1)
    with pytest.raises(DataError, match=r"No document for the train split: 0 documents.*raise data\.max_bytes"):
        Loader(replace(make(), data=replace(make().data, path=str(path), max_bytes=1)), 0, 1)
    data.max_bytes = sum(len(message["content"]) for message in ASKED)
    assert len(list(read_conversations(data, [path]))) == 1


def test_data_sets_and_sources_of_other_formats_say_the_same(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"messages": ASKED}]).save_to_disk(tmp_path / "saved")
    assert is_data_set(str(tmp_path / "saved")) and read(tmp_path / "saved") == [ASKED]
    assert is_data_set("some-owner/some-name") and not is_data_set(f"{tmp_path.name}/a.jsonl")
    assert not is_data_set("automoe/nothing")  # a folder of that name is here: a mistyped path
    turns = [{"speaker": "human", "value": "2+2?"}, {"speaker": "gpt", "value": "4"}]
    file = write(tmp_path / "turns.jsonl", {"conversations": turns})
    other = SourceConfig(path=str(file), format="sharegpt", keys={"role": "speaker"})
    sources = sources_of(DataConfig(kind="chat", sources=[SourceConfig(path=str(tmp_path / "saved")), other]))
    found = [[c.messages for c in read_conversations(one, find_files(one).values())] for _, _, one in sources]
    assert found == [[ASKED], [[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]]]


# The loader -----------------------------------------------------------------------------------------

Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A configuration over 40 conversations of two questions each, rows of 64 tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_chat(tmp_path / "chats.jsonl", [messages(f"{n}?", "a" * (n % 7 + 1), "and?", "b") for n in range(40)])

    def config(template: str | None = "chatml", seq_len: int = 64, **data: Any) -> Config:
        tokenizer = save_tokenizer(tmp_path / f"tokenizer-{template}", template)
        made = Config(train=TrainConfig(seq_len=seq_len, global_batch_size=4, micro_batch_size=1))
        made.model.vocab_size = 304
        made.data = replace(
            DataConfig(kind="chat", path=str(path), tokenizer=str(tokenizer), on_long="error", val_fraction=0.2), **data
        )
        return made

    return config


def test_rows_train_answers_alone_and_all_of_them(make: Make) -> None:
    loader = Loader(make(seq_len=128), 0, 1)
    loader.config.train.global_batch_size = loader.rows_per_rank = loader.rows_per_epoch
    batch = loader.next_step()
    trained = batch.labels[batch.labels != IGNORE]
    answers = loader.tokenizer.decode(trained.tolist()).split("<|im_end|>")
    validated = sum(b.labels.ne(IGNORE).any(1).sum() for b in loader.batches("validation", 1))
    assert set(answers) == {"b", "", *("a" * n for n in range(1, 8))} and validated > 0
    assert answers.count("b") == len(loader._rows_of("train", 0).lengths) < 40
    lines = loader.describe()
    assert lines[0].startswith("40 conversations, 80 answers: ") and lines[-2].endswith("% full")
    assert batch.tokens.shape == (loader.rows_per_epoch, 128) and (batch.doc_ids >= 0).float().mean() > 0.85


def test_a_template_that_drops_reasoning_unrolls_and_says_how_much(make: Make) -> None:
    said = " ".join(Loader(make("thinks"), 0, 1).describe())
    assert "the chat template, or the tokenizer, rewrites earlier turns" in said
    assert "40 conversations are 80 samples with 1." in said and "data.chat.turns=last" in said
    last = make("thinks", chat=ChatConfig(turns="last"))
    assert Loader(last, 0, 1).describe()[0].startswith("40 conversations, 40 answers")


def test_samples_of_a_conversation_are_on_one_side_of_the_split(make: Make) -> None:
    loader = Loader(make("thinks"), 0, 1)
    lines = {split: set() for split in ("train", "validation")}
    for split, found in lines.items():
        rows = loader._rows_of(split, 0)
        found.update(loader.corpora[0].lines[np.searchsorted(loader.corpora[0].starts, rows.starts)].tolist())
    assert not lines["train"] & lines["validation"] and len(lines["train"] | lines["validation"]) == 40


def test_a_resumed_loader_goes_on_and_other_settings_are_refused(make: Make) -> None:
    whole = Loader(make("thinks"), 0, 1)
    batches = [whole.next_step() for _ in range(60)]
    assert whole.consumed_rows > 2 * whole.rows_per_epoch
    first = Loader(make("thinks"), 0, 1)
    for _ in range(25):
        first.next_step()
    ranks = [Loader(make("thinks"), rank, 2) for rank in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    for rank in ranks:
        rank.load_state_dict(state)
    for batch in batches[25:]:
        parts = [rank.next_step() for rank in ranks]
        for name in ("tokens", "labels", "positions", "doc_ids"):
            assert torch.equal(getattr(batch, name), torch.cat([getattr(part, name) for part in parts]))
    for other in (make("chatml"), make("thinks", chat=ChatConfig(turns="last")), make("thinks", on_long="drop")):
        with pytest.raises(DataError, match=r"data changed.*(chat template|data\.on_long) was"):
            Loader(other, 0, 1).load_state_dict(state)


def test_conversations_that_move_between_the_splits_are_refused_on_a_resume(make: Make, tmp_path: Path) -> None:
    """A key that no template reads decides by its hash on the split, and leaves every token as it is."""
    for name, more in (("plain", {}), ("named", {"id": 1})):
        turns = [[one | more for one in messages(f"{n}+1?", f"{n + 1}")] for n in range(40)]
        write_chat(tmp_path / f"{name}.jsonl", turns)
    states, contents = [], []
    for val_fraction in (0.2, 0.0):
        for name in ("plain", "named"):
            config = make("chatml")
            config.data.path, config.data.val_fraction = str(tmp_path / f"{name}.jsonl"), val_fraction
            config.train.val_every = 0
            loader = Loader(config, 0, 1)
            states.append(loader.state_dict())
            contents.append(loader.corpora[0].content)
    assert len({*contents}) == 1
    with pytest.raises(DataError, match=r"data changed.*conversations was \w+, is \w+"):
        config.data.val_fraction = 0.2
        Loader(config, 0, 1).load_state_dict(states[0])
    assert states[2] == states[3], "without a validation split nothing moved"


def test_a_sample_longer_than_a_row_is_named_dropped_or_cut(make: Make) -> None:
    longest = int(Loader(make(), 0, 1).corpora[0].lengths.max())
    short = longest - 2
    with pytest.raises(
        DataError, match=rf"chats\.jsonl:7: a conversation of {short + 1} tokens does not fit train\.seq_len={short} "
    ):
        Loader(make(seq_len=short), 0, 1)
    dropped, cut = (Loader(make(seq_len=short, on_long=what), 0, 1) for what in ("drop", "truncate"))
    assert (dropped._rows_of("train", 0).lengths <= short).all()
    assert len(dropped._rows_of("train", 0).lengths) < len(cut._rows_of("train", 0).lengths)
    assert cut._rows_of("train", 0).lengths.max() == short
    assert "left out" in " ".join(dropped.describe()) and "cut, or left out" in " ".join(cut.describe())
    # A template that rewrites turns makes several samples of a conversation: the message counts samples.
    lengths = Loader(make("thinks"), 0, 1).corpora[0].lengths
    assert len(lengths) > 40
    with pytest.raises(DataError, match=rf"\({len(lengths)} of {len(lengths)} samples do not;"):
        Loader(make("thinks", seq_len=int(lengths.min()) - 1), 0, 1)
    with pytest.raises(DataError, match=r"No conversation is left for the train split: each is longer"):
        Loader(make(seq_len=8, on_long="drop"), 0, 1)


def test_what_would_train_nothing_or_leak_is_refused(make: Make) -> None:
    checked = make()
    validate(checked, 1)
    for key, value, message in [
        ("on_long", "split", r"half a conversation answers no question.*data=chat"),
        ("document_mask", False, r"samples that share a row attend only to themselves.*data\.chat\.pack=false"),
    ]:
        with pytest.raises(ConfigError, match=message):
            validate(replace(checked, data=replace(checked.data, **{key: value})), 1)
    with pytest.raises(ConfigError, match=r"data\.chat\.template=None: the tokenizer .* has no chat template"):
        Loader(make(None), 0, 1)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=200: the tokenizer .* makes ids up to"):
        small = make()
        small.model.vocab_size = 200
        Loader(small, 0, 1)


def test_a_row_is_shown_with_what_is_trained(make: Make) -> None:
    loader = Loader(make(), 0, 1)
    row = loader.row(0)
    lines = describe_row(*(one[0].numpy() for one in (row.tokens, row.labels, row.doc_ids)), loader.tokenizer)
    shown = [text for text, trained in lines if trained]
    assert all(text.startswith("trained > | ") for text in shown) and all(len(text) <= 80 for text, _ in lines)
    assert any("<|im_end|>" in text for text in shown) and not any("user" in text for text in shown)
    assert any(text.endswith("<|im_start|>assistant⏎") for text, trained in lines if not trained)
    assert loader.consumed_rows == 0


def test_questions_about_the_library_are_on_every_machine(make: Make) -> None:
    data = DataConfig(kind="stdlib_chat", max_bytes=2000)
    found = list(read_conversations(data, find_files(data).values()))
    assert 10 < len(found) < 100 and all(len(one.messages) == 2 for one in found)
    assert found[0].messages[0]["content"].startswith("What is the ") and found[0].where.endswith(
        f".py:{found[0].line}"
    )


def test_text_in_parts_stays_in_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "é"}, {"type": "text", "text": "b"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]
    [found] = read(write_chat(tmp_path / "a.jsonl", [turns]))
    assert [message["content"] for message in found] == [parts, "é"]
    assert list(map(num_bytes, found)) == [3, 2]


def test_special_tokens_that_changed_are_read_again(make: Make) -> None:
    config = make("bare")
    settings = Path(config.data.tokenizer or "") / "tokenizer_config.json"
    old = json.loads(settings.read_text())
    (settings.parent / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATES["chatml"])
    for bos in ("<|user|>", "<|tool|>"):
        settings.write_text(json.dumps(old | {"bos_token": bos}))
        loader = Loader(config, 0, 1)
        assert loader.tokenizer.decode(loader.corpora[0].tokens[:1]) == bos


def test_no_token_to_stop_at_is_an_error_for_people(make: Make) -> None:
    config = make("bare")
    folder = Path(config.data.tokenizer or "")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(ConfigError, match=r"has no eos_token.*Set eos_token in its tokenizer_config\.json"):
        Loader(config, 0, 1)
