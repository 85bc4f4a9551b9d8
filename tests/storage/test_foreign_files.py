"""Files of a stranger that would crash, hang or mislead: each is an error in words that says which and where."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import transformers.utils.chat_template_utils  # noqa: F401  (no child spends its time on that)

from automoe import cli
from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.config.schema import Config
from automoe.data import corpora
from automoe.data.chat_template import ChatTemplate
from automoe.data.prepare import open_corpus
from automoe.data.tokenizer import check_tokenizer, load_tokenizer, stored_template
from automoe.errors import ConfigError
from automoe.launch import prepare
from automoe.storage import foreign, guarded
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.hf_models import save_small_hf
from tests.support.hostile import DEEP, DEEPER, DIGITS, ends_within, refused


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Small limits, so that what hits them takes no time, and an end for what would hang all the same."""
    monkeypatch.setattr(guarded, "MAX_SECONDS", 1)
    monkeypatch.setattr(guarded, "MAX_BYTES", 1 << 29)
    monkeypatch.setattr(corpora, "MAX_RECORD_BYTES", 1 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    with ends_within(60):
        yield


# Settings of a tokenizer
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tokenizer_config.json", "eos_token", "7"),
        ("tokenizer_config.json", "eos_token", '["<s>"]'),
        ("tokenizer_config.json", "eos_token", '{"special": true}'),
        ("tokenizer_config.json", "eos_token", '{"content": 5}'),
        ("tokenizer_config.json", "bos_token", "false"),
        ("tokenizer_config.json", "pad_token", '"\\ud800"'),
        ("tokenizer_config.json", "model_max_length", '"long"'),
        ("tokenizer_config.json", "model_max_length", "Infinity"),
        ("tokenizer_config.json", "model_max_length", "1" + "0" * 400),
        ("tokenizer_config.json", "added_tokens_decoder", "[1, 2]"),
        ("tokenizer_config.json", "added_tokens_decoder", '"x"'),
        ("tokenizer_config.json", "extra_special_tokens", "5"),
        ("tokenizer_config.json", "tokenizer_class", "{}"),
        ("tokenizer_config.json", "chat_template", "12"),
        ("tokenizer_config.json", "chat_template", '[{"name": "default"}]'),
        ("tokenizer_config.json", "chat_template", '[["default", "{{ 1 }}"]]'),
        ("tokenizer_config.json", "chat_template", '"\\udfff"'),
        ("tokenizer_config.json", "add_bos_token", '"yes"'),
        ("special_tokens_map.json", "eos_token", "[1]"),
        ("special_tokens_map.json", "unk_token", "1e999"),
        ("special_tokens_map.json", "additional_special_tokens", "true"),
        ("generation_config.json", "eos_token_id", '"</s>"'),
        ("generation_config.json", "eos_token_id", "1000000000000"),
        ("generation_config.json", "eos_token_id", "[1, [2]]"),
        ("generation_config.json", "eos_token_id", "NaN"),
        ("generation_config.json", "pad_token_id", "true"),
        ("generation_config.json", "temperature", '"hot"'),
        ("generation_config.json", "stop_strings", '{"a": 1}'),
        ("generation_config.json", "watermarking_config", "[1]"),
        ("generation_config.json", "forced_eos_token_id", '"x"'),
        ("chat_template.json", "chat_template", "{}"),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_settings_of_wrong_types(name: str, key: str, value: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    (folder / name).write_text(f'{{"{key}": {value}}}')
    refused(lambda: check_tokenizer(str(folder)), f"{folder / name}", f"{key}=", "which must be")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (f'{{"x": {DEEP}}}', "nested deeper than 100"),
        (f'{{"x": {DEEPER}}}', "nested deeper than 100"),
        (f'{{"eos_token_id": {DIGITS}}}', "Exceeds the limit"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("", "Expecting value"),
        ('{"a": 1, "a": 2}', "'a' occurs twice in it"),
        (b'\xff\xfe{"a": 1}', "can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
    ids=["deep", "deeper", "digits", "list", "null", "empty", "twice", "utf16", "bom"],
)
def test_settings_that_are_none(name: str, content: str | bytes, needle: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(lambda: check_tokenizer(str(folder)), f"{folder / name}", needle)


# Parts of a tokenizer that compute
# ---------------------------------------------------------------------------------------------------------------------


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: str, content: str = "") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", split("(a+)+$")),
        ("pre_tokenizer", split("(a|aa)+$")),
        ("pre_tokenizer", split("(" * 5000 + "a" + ")" * 5000)),
        ("pre_tokenizer", split("(")),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [split("\\s"), split("(0+)+b")]}),
        ("normalizer", replace("(a*)*$")),
        ("normalizer", replace("", "y" * 40_000_000)),
        ("normalizer", {"type": "Sequence", "normalizers": [replace("", "ab" * 400)] * 4}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_parts_of_a_tokenizer_that_never_end(part: str, value: Any, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(spec | {part: value}))
    said = refused(lambda: check_tokenizer(str(folder)), str(folder / "tokenizer.json"))
    assert "takes more than" not in said or f"tokenizer.json: {part}" in said


def test_an_expression_that_a_text_alone_sets_off(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(spec | {"pre_tokenizer": split("(q+)+$")}))
    tokenizer = load_tokenizer(str(folder))
    (tmp_path / "a.txt").write_text("q" * 60 + "!")
    data = DataConfig(kind="text", path=str(tmp_path / "a.txt"))
    refused(lambda: open_corpus(data, tokenizer), "tokenizer.json: pre_tokenizer, of 1 texts that begin ['qqq")


def test_a_tokenizer_is_tried_where_a_run_is_prepared_and_not_by_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(spec | {"pre_tokenizer": split("(a+)+$")}))
    data = DataConfig(kind="stdlib", tokenizer=str(folder))
    config = Config(run_dir=str(tmp_path / "run"), data=data)
    refused(lambda: prepare.check(config, 1, "cpu"), str(folder / "tokenizer.json"))
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a rank forks a child"))
    assert load_tokenizer(str(folder)).vocab_size > 0


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (DEEPER, "cannot be read"),
        ("{}", "tokenizer.json cannot be read"),
        ('{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}', "16,777,215"),
        ('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "cannot be read"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}}', "cannot be read"),
        ('{"model": {"type": "Unigram", "vocab": [], "unk_id": 9}}', "cannot be read"),
    ],
)
def test_a_tokenizer_that_is_none(content: str, needle: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "tokenizer.json").write_text(content)
    refused(lambda: load_tokenizer(str(folder)), str(folder), needle)


# Templates
# ---------------------------------------------------------------------------------------------------------------------

EACH = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
NEST = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


def chat_corpus(tmp_path: Path, **chat: Any) -> None:
    path = write_chat(tmp_path / "c.jsonl", [messages("q", "a")])
    data = DataConfig(kind="chat", path=str(path), chat=ChatConfig(**chat))
    folder = str(tmp_path / "t")
    open_corpus(data, load_tokenizer(folder), template=ChatTemplate(data.chat, folder))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("template", "needle"),
    [
        (NEST, "takes more than 1 seconds of processor time"),
        (EACH + "{% if messages | length > 1 %}" + NEST + "{% endif %}", "takes more than 1 seconds"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% macro f() %}{{ f() ~ f() }}{% endmacro %}{% for a in range(99999) %}{{ f() }}{% endfor %}", "template"),
        ("{{ '%*d' % (2000000000, 1) }}", "template"),
        ("{{ '%2000000000d' | format(1) }}", "template"),
        ("{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x * 2 %}{% endfor %}{{ ns.x }}", "template"),
        ("{{ 9 ** (9 ** 9) }}", "takes more than 1 seconds"),
        ("{% set ns = namespace(x=[1]) %}{% for a in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "template"),
        (EACH + "{{ '\\ud800' }}", "surrogates not allowed"),
        (EACH + "{{ 'a' * 300000000 }}", "template"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "template"),
        ("{{ cycler.__init__.__globals__.os.system('touch ran') }}", "template"),
        ("{{ self._TemplateReference__context }}" + "{{ ''.__class__.mro() }}", "template"),
        ("{% include '/etc/passwd' %}", "template"),
        ("{% import 'os' as os %}{{ os.system('true') }}", "template"),
        ("{% for m in messages %}{{ m.role", "TemplateSyntaxError"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages[99].content }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ strftime_now('%Y' * 10000000) | length }}" + NEST, "template"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "template"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_templates_that_do_harm(template: str, needle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_tokenizer(tmp_path / "t", None)
    (folder / "chat_template.jinja").write_text(template)
    said = refused(lambda: chat_corpus(tmp_path), needle)
    # A template that hangs is met by the probe of a first answer, which names the tokenizer's folder.
    assert f"{tmp_path / 'c.jsonl'}:1" in said or f"{folder}:1: chat template" in said
    assert "template" in said and not Path("ran").exists()


def test_templates_that_are_not_text(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    (folder / "chat_template.jinja").write_bytes(EACH.encode() + b"\xe9")
    refused(lambda: stored_template(ChatConfig(), str(folder)), f"{folder}/chat_template.jinja", "can't decode")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").mkdir()
    refused(lambda: stored_template(ChatConfig(), str(folder)), "chat_template.jinja is a folder, not a file")
    (folder / "chat_template.jinja").rmdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").symlink_to("/etc/passwd")
    refused(lambda: stored_template(ChatConfig(), str(folder)), "leads out of the checkpoint's folder")


# Records
# ---------------------------------------------------------------------------------------------------------------------


def write_offsets(path: Path, offsets: list[int]) -> None:
    """An Arrow stream of 3 texts whose offsets are replaced in the file."""
    table = pa.table({"text": pa.array(["aaa", "bbb", "ccc"])})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    raw = path.read_bytes()
    assert raw.count(struct.pack("<4i", 0, 3, 6, 9)) == 1
    path.write_bytes(raw.replace(struct.pack("<4i", 0, 3, 6, 9), struct.pack("<4i", *offsets)))


def call(**call: Any) -> str:
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""} | call]
    return json.dumps({"messages": turn})


def same_names() -> bytes:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["messages", "messages"])
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


RECORDS: dict[str, tuple[str | bytes | Callable[[], bytes], str]] = {
    "twice.jsonl": (
        json.dumps({"messages": [{"role": "user"}]}).replace('"role"', '"role": "tool", "role"'),
        "'role' occurs twice in it",
    ),
    "many.jsonl": (
        json.dumps({"messages": messages("q", "a") * 10_000}),
        ":1: chat template: this takes more than 1 seconds",
    ),
    "names.parquet": (same_names, "columns with the same name: messages, messages"),
    "blanks.jsonl.gz": (gzip.compress(b" " * 3_000_000), ":1: "),
    "lines.jsonl.gz": (gzip.compress(b" " * 1023 * 3000), "a line of more than 1,048,576 bytes"),
    "endless.jsonl": ('{"messages": "' + "x" * 2_000_000, ":1: a line of more than 1,048,576 bytes"),
    "deep.jsonl": (f'{{"messages": {DEEP}}}', ":1: not valid JSON (it is nested deeper"),
    "deeper.jsonl": (f'{{"messages": {DEEPER}}}', ":1: not valid JSON"),
    "digits.jsonl": (f'{{"messages": {DIGITS}}}', ":1: not valid JSON (Exceeds"),
    "inner.jsonl": (json.dumps({"messages": DEEPER}), ":1: 'messages' is '[[["),
    "tools.jsonl": (json.dumps({"messages": messages("q", "a"), "tools": [{"function": "f"}]}), ":1: tools are not a"),
    "tool.jsonl": (json.dumps({"messages": messages("q", "a"), "tools": ["f"]}), ":1: tools are not a"),
    "calls.jsonl": (call(tool_calls="f"), ":1: message 2 has tool_calls that are not a"),
    "called.jsonl": (call(tool_calls=["f"]), ":1: message 2 has tool_calls that are not a"),
    "call.jsonl": (call(tool_calls=[{"function": [1]}]), ":1: message 2 has tool_calls that are not a"),
    "cut.jsonl.gz": (gzip.compress(call().encode())[:-9], "cannot be read"),
    "none.jsonl.zst": (b"(\xb5/\xfd" + b"\xff" * 50, "cannot be read"),
    "none.parquet": (b"PAR1" + b"\xff" * 50 + b"PAR1", "the parquet file cannot be read"),
    "header.parquet": (b"PAR1" + b"\xff\xff\xff\x7f" + b"PAR1", "the parquet file cannot be read"),
    "none.arrow": (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"\xff" * 50, "the arrow file cannot be read"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", RECORDS)
def test_records_that_do_harm(name: str, tmp_path: Path) -> None:
    content, needle = RECORDS[name]
    path = tmp_path / name
    content = content() if callable(content) else content
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    folder = str(save_tokenizer(tmp_path / "t", "thinks"))
    chat = ChatConfig()
    data = DataConfig(kind="chat", path=str(path), chat=chat)
    refused(lambda: open_corpus(data, load_tokenizer(folder), template=ChatTemplate(chat, folder)), str(path), needle)


@pytest.mark.parametrize(
    "offsets", [[0, 3, 6, 1 << 30], [0, 3, 6, -9], [0, 1 << 30, 6, 9], [9, 6, 3, 0], [-(1 << 31), 3, 6, 9]], ids=str
)
def test_arrow_offsets_outside_their_buffer(offsets: list[int], tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    write_offsets(path, offsets)
    data = DataConfig(kind="hub", path=str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    read = corpora.parquet_records(path, ["text"])
    refused(lambda: list(read), str(path), "the arrow file cannot be read")
    assert data.kind == "hub"


@pytest.mark.parametrize("nested", [False, True])
def test_a_row_of_a_table_has_a_limit_as_a_line_has(nested: bool, tmp_path: Path) -> None:
    texts = ["a", "x" * 2_000_000, "b"]
    column = [[{"role": "user", "content": text}] for text in texts] if nested else texts
    for name, write in (
        ("x.parquet", pa.parquet.write_table),
        ("y.parquet", partial(pa.parquet.write_table, row_group_size=1)),
    ):
        write(pa.table({"text": column}), tmp_path / name)
        read = corpora.parquet_records(tmp_path / name, ["text"])
        assert next(read)[1] == {"text": column[0]}
        refused(lambda read=read: list(read), f"{tmp_path / name}: row 2 has 2,000,0", "at most 1,048,576")


# A folder that transformers would load
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "hf"
    save_small_hf("qwen3_moe", folder, other_sizes={"vocab_size": 304})
    return save_tokenizer(folder, "chatml")


@pytest.mark.parametrize(
    ("name", "change", "needles"),
    [
        ("config.json", {"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000"]),
        ("config.json", {"num_hidden_layers": "2"}, ["num_hidden_layers"]),
        ("config.json", {"num_hidden_layers": [2]}, ["num_hidden_layers"]),
        ("config.json", {"hidden_size": 10**12}, ["numbers"]),
        ("config.json", {"num_experts": 10**9, "num_local_experts": 10**9}, ["experts"]),
        ("config.json", {"vocab_size": {}}, ["vocab_size"]),
        ("config.json", {"rope_parameters": {"rope_theta": "x", "rope_type": "default"}}, ["config.json"]),
        ("config.json", {"model_type": 5}, ["model_type=5"]),
        ("config.json", {"model_type": "llama", "num_hidden_layers": 9999}, ["config.json"]),
        ("config.json", {"model_type": "gpt2", "n_layer": 10**7, "num_hidden_layers": 10**7}, ["num_hidden_layers"]),
        ("config.json", {"attn_implementation": "who/kernel"}, ["attn_implementation='who/kernel'"]),
        ("config.json", {"_attn_implementation": "flash_attention_2"}, ["_attn_implementation='flash_attention_2'"]),
        ("config.json", {"experts_implementation": "sonicmoe"}, ["experts_implementation='sonicmoe'"]),
        ("config.json", {"transformers_weights": "other.safetensors"}, ["transformers_weights='other.safetensors'"]),
        ("config.json", {"text": {"attn_implementation": "who/kernel"}}, ["text.attn_implementation"]),
        ("config.json", {"quantization_config": [1]}, ["quantization_config=[1]"]),
        ("config.json", {"quantization_config": {"quant_method": 7}}, ["quantization_config.quant_method=7"]),
        ("config.json", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ["bitsandbytes"]),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": "x"}}, ["gptq"]),
        ("config.json", {"quantization_config": {"quant_method": "fp8", "weight_block_size": 3}}, ["weight_block_size"]),
        ("config.json", {"eos_token_id": 10**12}, ["eos_token_id=1000000000000"]),
        ("generation_config.json", {"forced_eos_token_id": [["a"]]}, ["forced_eos_token_id"]),
        ("generation_config.json", {"watermarking_config": 5}, ["watermarking_config=5"]),
        ("generation_config.json", {"stop_strings": 3}, ["stop_strings=3"]),
        ("generation_config.json", {"eos_token_id": "</s>"}, ["eos_token_id='</s>'"]),
        ("generation_config.json", {"top_k": [1]}, ["top_k=[1]"]),
        ("generation_config.json", {"max_new_tokens": 1e400}, ["max_new_tokens=inf"]),
        ("tokenizer_config.json", {"eos_token": 3}, ["eos_token=3"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "y"}}}, ["transformers cannot load"]),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_checkpoint_that_generate_refuses_as_train_does(
    name: str,
    change: dict[str, Any],
    needles: list[str],
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "hf"))
    old = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(old | change))
    assert cli.main(["generate", str(folder), "--max-new-tokens", "2", "Who?"]) == 2
    written = capsys.readouterr()
    assert written.out == "" and written.err.startswith("error: ")
    for needle in [str(folder), *needles]:
        assert needle in written.err


def test_settings_of_generation_that_are_not_followed_are_named(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "hf"))
    settings = {"watermarking_config": {"greenlist_ratio": 0.5}, "stop_strings": ["x"], "forced_eos_token_id": 1}
    assert cli.main(["generate", str(folder), "--max-new-tokens", "2", "Who?"]) == 0
    expected = capsys.readouterr().out
    old = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(old | settings))
    assert cli.main(["generate", str(folder), "--max-new-tokens", "2", "Who?"]) == 0
    written = capsys.readouterr()
    assert written.out == expected
    assert "settings not followed: forced_eos_token_id, stop_strings, watermarking_config" in written.err
    (folder / "chat_template.jinja").write_text(NEST)
    assert cli.main(["generate", str(folder), "Who?"]) == 2
    assert "takes more than 1 seconds of processor time" in capsys.readouterr().err


# The child
# ---------------------------------------------------------------------------------------------------------------------


def test_a_child_where_sigchld_is_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert guarded.guarded("work", lambda: 7) == 7
        refused(lambda: guarded.guarded("work", lambda: signal.raise_signal(signal.SIGSEGV)), "work: this ends")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_lower_limit_of_memory_that_the_user_has_set_stays() -> None:
    before = guarded.limit_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)[0] - guarded.MAX_BYTES // 2, before[1]
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        assert guarded.guarded("work", lambda: resource.getrlimit(resource.RLIMIT_DATA)) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_errors_of_a_child_are_those_of_its_work() -> None:
    def fail() -> None:
        raise ConfigError("mesh.ep", 3, "no divisor", "Take 4")

    with pytest.raises(ConfigError, match=r"mesh.ep=3: no divisor. Take 4") as caught:
        guarded.guarded("work", fail)
    assert (caught.value.key, caught.value.remedy) == ("mesh.ep", "Take 4")
    with pytest.raises(ZeroDivisionError) as other:
        guarded.guarded("work", lambda: 1 // 0)
    assert "in <lambda>" in other.value.__notes__[0]
    refused(lambda: guarded.guarded("work", lambda: bytearray(1 << 32)), "work: this takes more than 0.5 GB of memory")


# What is right
# ---------------------------------------------------------------------------------------------------------------------


def test_what_is_right_is_read(tmp_path: Path) -> None:
    """Values that published files have: large limits, padding of -1, ids as lists, null, names of tokens."""
    folder = save_tokenizer(tmp_path / "t", "chatml")
    old = json.loads((folder / "tokenizer_config.json").read_text())
    right = {
        "model_max_length": 10**30,
        "bos_token": None,
        "unk_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False},
        "extra_special_tokens": {},
        "additional_special_tokens": ["<|im_start|>"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(old | right))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "pad_token_id": -1, "temperature": 0.6}')
    chat_corpus(tmp_path)
    assert foreign.parse_yaml(b"a: &a {x: 1}\nb: *a\n") == {"a": {"x": 1}, "b": {"x": 1}}
    assert foreign.parse_json(b'{"a": [[[1]]]}') == {"a": [[[1]]]}
