"""Records that ``datasets`` wrote, with JSON columns, are what they were as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.data.chat import read_conversations
from automoe.data.chat_template import ChatTemplate
from automoe.data.corpora import find_files, parquet_records, read_documents
from automoe.errors import DataError
from tests.support.chat import TEMPLATES, messages, save_tokenizer

PARTS = [{"type": "text", "text": "4"}, {"type": "text", "text": "or four"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": "integer"}}}}}
    for name, key in (("add", "x"), ("sub", "y"))
]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1, "or": [None, "a"]}}}]
TURNS = [
    messages("2+2?", '"quoted"'),  # text that is JSON stays text
    messages("2+2?", '{"a": 1}'),
    [messages("?")[0], {"role": "assistant", "content": PARTS}],
    [messages("?")[0] | {"name": "me"}, {"role": "assistant", "content": "", "tool_calls": CALL}],
]
# datasets itself loses the quotes of text that is JSON where a JSON value is that text and nothing more.
A, B = [{"role": "assistant", "content": 'say "4"'}], [{"role": "assistant", "content": PARTS}]
ASKED = messages("2+2?")
RECORDS = {
    "chat": [{"messages": one, "tools": TOOLS[: n % 3]} for n, one in enumerate(TURNS)],
    "chat, parts alone": [
        {"messages": ASKED + A},
        {"messages": ASKED + B, "chat_template_kwargs": {"shout": True, "by": ["a", 1]}},
    ],
    "prompts": [{"prompt": one[:-1], "completion": one[-1:]} for one in TURNS],
    "prompts and text": [
        {"prompt": ASKED, "completion": B},
        {"prompt": "a", "completion": "{b", "chat_template_kwargs": {"shout": 2}},
    ],
    "preference": [{"prompt": ASKED, "chosen": one[1:], "rejected": A} for one in TURNS]
    + [{"prompt": "a", "chosen": "b", "rejected": "[c", "tools": TOOLS}],
}
SHOWS = "{{ tools | tojson }}{{ 'LOUD' if shout else '' }}{{ by }}" + TEMPLATES["thinks"].replace(
    "m.content }}", "m.content if m.content is string else m.content | tojson }}"
)


def tokens(path: Path, kind: str, folder: Path) -> list[Any]:
    save_tokenizer(folder, None)
    (folder / "own.jinja").write_text(SHOWS)
    template = ChatTemplate(ChatConfig(template=str(folder / "own.jinja")), str(folder))
    data = DataConfig(kind="preference" if kind == "preference" else "chat", path=str(path))
    return template.samples(list(read_conversations(data, find_files(data).values())))


def written(records: list[Any], folder: Path, features: Any = None) -> tuple[Path, list[Path]]:
    """The records as JSON lines, and as parquet, saved folder and cache of ``datasets``."""
    import datasets

    lines = folder / "a.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    read = datasets.load_dataset(
        "json", data_files=str(lines), split="train", cache_dir=str(folder / "cache"), features=features
    )
    assert "Json" in repr(read.features)
    read.to_parquet(folder / "a.parquet")
    read.save_to_disk(folder / "saved")
    return lines, [folder / "a.parquet", folder / "saved", Path(read.cache_files[0]["filename"])]


@pytest.mark.parametrize("kind", RECORDS)
def test_conversations_have_the_tokens_of_their_json_lines(tmp_path: Path, kind: str) -> None:
    lines, others = written(RECORDS[kind], tmp_path)
    expected = tokens(lines, kind, tmp_path / "tokenizer")
    assert [tokens(path, kind, tmp_path / "tokenizer") for path in others] == [expected] * 3


def test_documents_are_those_of_their_json_lines(tmp_path: Path) -> None:
    import datasets

    records = [{"text": text} for text in ('say "4"', "{a: 1}", "plain", "line\n")]
    lines, others = written(records, tmp_path, datasets.Features({"text": datasets.Json()}))

    def texts(path: Path, kind: str) -> list[str]:
        data = DataConfig(kind=kind, path=str(path))
        return [one.text for one in read_documents(data, find_files(data).values())]

    expected = [record["text"] for record in records]
    assert texts(lines, "jsonl") == texts(others[0], "parquet") == texts(others[1], "hub") == expected


def nested() -> dict[str, pyarrow.Array]:
    """What Arrow can nest JSON in: three rows each, of the values 1, null and {"a": ["x"]}."""
    values = pyarrow.array(["1", None, '{"a": ["x"]}'], pyarrow.json_())
    large = pyarrow.array(["1", None, '{"a": ["x"]}'], pyarrow.json_(pyarrow.large_string()))
    ends, keys = [0, 1, 2, 3], pyarrow.array(["k"] * 3)
    indices, kinds = pyarrow.array([0, 1, 2], pyarrow.int8()), pyarrow.array([0] * 3, pyarrow.int8())
    return {
        "plain": values,
        "large": large,
        "text": pyarrow.array(["1", None, '{"a": ["x"]}']),
        "struct": pyarrow.StructArray.from_arrays([values, large], ["a", "b"]),
        "list": pyarrow.ListArray.from_arrays(ends, values),
        "large_list": pyarrow.LargeListArray.from_arrays(ends, pyarrow.StructArray.from_arrays([values], ["a"])),
        "fixed": pyarrow.FixedSizeListArray.from_arrays(values, 1),
        "map": pyarrow.MapArray.from_arrays(ends, keys, values),
        "dictionary": pyarrow.DictionaryArray.from_arrays(indices, values),
        "run_end": pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([1, 2, 3]), values),
        "union": pyarrow.UnionArray.from_sparse(kinds, [values, keys]),
    }


def test_the_type_decides_at_any_depth(tmp_path: Path) -> None:
    # A stream takes dictionaries of JSON and cannot be opened again (pyarrow 26.0.1).
    batch = pyarrow.record_batch({name: one for name, one in nested().items() if name != "dictionary"})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", batch.schema) as stream:
        stream.write_batch(batch)
        stream.write_batch(batch)
    made = {
        "struct": lambda one: {"a": one, "b": one},
        "list": lambda one: [one],
        "large_list": lambda one: [{"a": one}],
        "fixed": lambda one: [one],
        "map": lambda one: {"k": one},
    }
    rows = [record for _, record in parquet_records(tmp_path / "a.arrow")]
    for row, one in zip(rows, [1, None, {"a": ["x"]}] * 2, strict=True):
        text = None if one is None else json.dumps(one)
        assert row == {name: made.get(name, lambda one: one)(one) for name in row} | {"text": text}


def test_parquet_says_json_without_an_arrow_schema_and_bad_json_names_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"  # as DuckDB writes it
    pyarrow.parquet.write_table(pyarrow.table({"a": nested()["plain"]}), path, store_schema=False)
    assert [record["a"] for _, record in parquet_records(path)] == [1, None, {"a": ["x"]}]
    for bad in ("{", '{"a": 1, "a": 2}', "[" * 2000 + "]" * 2000):
        column = pyarrow.array(["1", bad], pyarrow.json_())
        pyarrow.parquet.write_table(pyarrow.table({"a": column}), path)
        with pytest.raises(DataError, match=r"a\.parquet: row 2: the parquet file cannot be read"):
            list(parquet_records(path))
