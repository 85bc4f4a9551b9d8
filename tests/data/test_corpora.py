"""Reading text, JSON lines and parquet: what is read, and how bad input is refused."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from automoe.config.data_schema import DataConfig
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.data.corpora import Document, find_files, read_documents
from automoe.errors import ConfigError, DataError
from tests.support.configurations import quick_config


def read(kind: str, path: Path | str | None, **options) -> list[Document]:
    data = DataConfig(kind=kind, path=None if path is None else str(path), **options)
    return list(read_documents(data, find_files(data).values()))


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_links_in_a_folder_count_once_or_are_refused(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        (place / "a.txt").write_text("text")
    (folder / "A.txt").symlink_to("a.txt")
    (folder / "again").symlink_to(".")
    (folder / "other.txt").symlink_to(elsewhere / "a.txt")
    data = DataConfig(kind="text", path=str(folder))
    assert list(find_files(data)) == ["a.txt", "other.txt"]
    (folder / "more").symlink_to(elsewhere)
    with pytest.raises(DataError, match="more: a link to a folder elsewhere"):
        find_files(data)
    (folder / "more").unlink()
    (folder / "lost.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"lost\.txt: a broken link"):
        find_files(data)


def test_stdlib_is_megabytes_of_library_and_no_tests():
    data = DataConfig()
    files = find_files(data)
    assert list(files) == sorted(files) and "argparse.py" in files
    assert not [name for name in files if {"test", "site-packages"} & set(name.split("/"))]
    documents = list(read_documents(data, files.values()))
    assert sum(len(document.text) for document in documents) > 5e6
    assert all(document.text for document in documents)


def test_text_file_directory_and_glob(tmp_path):
    for name, text in {"b.txt": "bee", "a/c.txt": "sea", "a/d.md": "dee", ".hidden/x.txt": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [d.text for d in read("text", tmp_path / "b.txt")] == ["bee"]
    assert [d.text for d in read("text", tmp_path)] == ["sea", "dee", "bee"]
    assert [d.text for d in read("text", tmp_path / "**" / "*.txt")] == ["sea", "bee"]


def test_jsonl_reads_the_key_and_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "", "x": 1}\n{"body": "zwei ü"}')
    assert read("jsonl", path, text_key="body") == [Document("one", 0, 1), Document("zwei ü", 0, 4)]


def test_texts_that_look_like_dates_stay_as_they_are(tmp_path):
    """A JSON reader that infers types makes times of them."""
    texts = ["2024-05-01", "2024-05-01 10:30:00", "2024-05-01T10:30:00.123456789Z", "10:30:00", "1e5"]
    path = write_jsonl(tmp_path / "dates.jsonl", [{"text": text} for text in texts])
    assert [document.text for document in read("jsonl", path)] == texts


def test_parquet_reads_the_column_and_the_row(tmp_path):
    write_parquet(tmp_path / "a.parquet", body=["one", "", "three"], other=[1, 2, 3])
    write_parquet(tmp_path / "b.parquet", body=["four"])
    (tmp_path / "notes.txt").write_text("not parquet, not read")
    expected = [Document("one", 0, 1), Document("three", 0, 3), Document("four", 1, 1)]
    assert read("parquet", tmp_path, text_key="body") == expected


def test_max_bytes_cuts_at_a_character(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "dü"}, {"text": "never"}])
    assert [d.text for d in read("jsonl", tmp_path, max_bytes=6)] == ["abc", "dü"]
    assert [d.text for d in read("jsonl", tmp_path, max_bytes=5)] == ["abc", "d"]
    assert [d.text for d in read("jsonl", tmp_path, max_bytes=3)] == ["abc"]


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_compressed_files_and_folders_of_them(end, tmp_path):
    codec = {"": None, ".gz": "gzip", ".zst": "zstd"}[end]
    for name, lines in {"b": ["one", "zwei ü"], "sub/a": ["three"]}.items():
        path = tmp_path / f"{name}.jsonl{end}"
        path.parent.mkdir(exist_ok=True)
        with pyarrow.output_stream(path, compression=codec) as file:
            file.write("".join(json.dumps({"text": line}) + "\n" for line in lines).encode())
    expected = [Document("one", 0, 1), Document("zwei ü", 0, 2), Document("three", 1, 1)]
    assert read("jsonl", tmp_path) == expected
    assert read("jsonl", tmp_path / f"b.jsonl{end}") == expected[:2]
    assert read("text", tmp_path / "sub" / f"a.jsonl{end}") == [Document('{"text": "three"}\n', 0, 0)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_folder_of_several_formats_is_refused_by_name(kind, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    (tmp_path / "README.md").write_text("which says what this is")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.parquet").write_text("hidden")
    assert len(read("jsonl", tmp_path)) == 1
    with pyarrow.output_stream(tmp_path / "a.jsonl.gz", compression="gzip") as file:
        file.write(b'{"text": "one"}\n')
    write_parquet(tmp_path / "b.parquet", text=["one"])
    with pytest.raises(DataError, match=rf"3 formats, such as a\.jsonl, a\.jsonl\.gz, b\.parquet.*\*\*/\*\.{kind}\"'"):
        read(kind, tmp_path)
    assert len(read(kind, tmp_path / "**" / f"*.{kind}")) == 1


@pytest.mark.parametrize("name", ["v[2]", "it's", "a b"])
def test_the_glob_that_an_error_offers_is_taken_as_a_shell_hands_it_over(name, tmp_path):
    (tmp_path / name).mkdir()
    write_jsonl(tmp_path / name / "a.jsonl", [{"text": "one"}])
    write_parquet(tmp_path / name / "b.parquet", text=["one"])
    with pytest.raises(DataError, match="read with a glob: ") as caught:
        read("jsonl", tmp_path / name)
    [typed] = shlex.split(str(caught.value).partition("with a glob: ")[2])
    data = quick_config("config", ["data=jsonl", typed]).data
    assert list(find_files(data)) == ["a.jsonl"]


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_damaged_compression_is_named(end, tmp_path):
    path = tmp_path / f"a.jsonl{end}"
    with pyarrow.output_stream(path, compression={".gz": "gzip", ".zst": "zstd"}[end]) as file:
        file.write(os.urandom(50_000).hex().encode())
    whole = path.read_bytes()
    path.write_bytes(whole[:-3000])
    with pytest.raises(DataError, match=rf"a\.jsonl\{end}: cannot be read \(.*[Tt]runcated"):
        read("jsonl", path)
    path.write_bytes(b"no such thing" + whole)
    with pytest.raises(DataError, match=rf"a\.jsonl\{end}: cannot be read"):
        read("jsonl", path)


def test_text_comes_in_parts_that_cut_no_character(tmp_path):
    text = "€uro and 數據\n" * 200_000
    (tmp_path / "a.txt").write_text(text)
    parts = read("text", tmp_path)
    assert len(parts) > 2 and "".join(part.text for part in parts) == text
    assert {(part.file, part.line) for part in parts} == {(0, 0)}
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xe2\x82")
    with pytest.raises(DataError, match=r"a\.txt:200001: byte 0xe2 is not UTF-8 \(unexpected end"):
        read("text", tmp_path)


def test_path_is_needed_and_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.kind=jsonl reads files, and no path is given.*Set data\.path"):
        validate(Config(data=DataConfig(kind="jsonl")), 1)
    with pytest.raises(DataError, match=r"gone\.txt: no file, directory or glob match.*Correct data\.path"):
        read("text", tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"no \*\.parquet file in this directory"):
        read("parquet", tmp_path)


BAD_LINES = {
    b'{"text": "ok"\n': r"a\.jsonl:2: not valid JSON \(.*delimiter.* at column 14\).*correct this line or remove",
    b'["text"]\n': r"a\.jsonl:2: a list where each line must be one JSON object",
    b'{"body": "x", "id": 3}\n': r"a\.jsonl:2: no key 'text'; this record has body, id\. Set data\.text_key",
    b'{"text": null}\n': r"a\.jsonl:2: 'text' is NoneType where text is needed",
    b'{"text": ["x"]}\n': r"a\.jsonl:2: 'text' is list where text is needed",
    b'{"text": "caf\xe9"}\n': r"a\.jsonl:2: byte 0xe9 is not UTF-8 .*iconv",
    b'{"text": "\\ud83d"}\n': r"a\.jsonl:2: not valid JSON \(.*ud83d.*surrogates not allowed",
    b"[" * 100_000 + b"\n": r"a\.jsonl:2: not valid JSON \(.*recursion",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_jsonl_line_is_named(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b'{"text": "also fine"}\n')
    with pytest.raises(DataError, match=BAD_LINES[line]):
        read("jsonl", path)


@pytest.mark.parametrize("text", ['[{"text": "a"}]', '[\n  {"text": "a"}\n]\n'])
def test_a_json_array_is_refused_with_a_remedy(text, tmp_path):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"a\.jsonl:1: a JSON array; .*jq -c '\.\[\]'"):
        read("jsonl", tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "latin1"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_another_encoding_is_no_text(kind, packed, encoding, tmp_path):
    """Latin letters of UTF-16 and UTF-32 are valid UTF-8, with zeros. The refused file is closed."""
    name = tmp_path / f"a.{kind}{packed}"
    good = '{"text": "good"}\n' * 3
    for before, text in (("", '{"text": "plain"}\n'), ("", '{"text": "für"}\n'), (good, '{"text": "für"}\n')):
        if text.isascii() and encoding == "latin1":
            continue
        codec = {"": None, ".gz": "gzip", ".zst": "zstd"}[packed]
        with pyarrow.output_stream(str(name), compression=codec) as out:
            out.write(before.encode() + text.encode(encoding))
        with pytest.raises(
            DataError, match=rf":{before.count(chr(10)) + 1}: byte .* is not UTF-8 .*Convert the file .*iconv"
        ) as caught:
            read(kind, name)
        opened = [os.readlink(one.path) for one in os.scandir("/proc/self/fd") if os.path.exists(one.path)]
        assert str(name) not in opened, caught.value


def test_bad_utf8_in_text_names_the_line(tmp_path):
    (tmp_path / "latin.txt").write_bytes("erste\nzweite\ndrítte\n".encode("latin1"))
    with pytest.raises(DataError, match=r"latin\.txt:3: byte 0xed is not UTF-8 .*Convert the file"):
        read("text", tmp_path)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_empty_file_is_named(kind, tmp_path):
    path = tmp_path / f"void.{kind}"
    path.touch()
    with pytest.raises(DataError, match=rf"void\.{kind}: the file is empty\. Remove it"):
        read(kind, path)


def test_file_of_blank_lines_or_no_rows_is_empty(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"blank\.jsonl: the file is empty"):
        read("jsonl", tmp_path)
    none = write_parquet(tmp_path / "none.parquet", text=pyarrow.array([], pyarrow.string()))
    with pytest.raises(DataError, match=r"none\.parquet: the file is empty"):
        read("parquet", none)


def test_bad_parquet(tmp_path):
    good = write_parquet(tmp_path / "good.parquet", body=["a"], id=[1])
    with pytest.raises(DataError, match=rf"^{good}: no column 'text'; this file has body, id\. Set data\.text_key"):
        read("parquet", good)
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"cut\.parquet: row 0: the parquet file cannot be read .*again"):
        read("parquet", tmp_path / "cut.parquet")
    with pytest.raises(DataError, match=r"null\.parquet: row 2: 'text' is NoneType where text is needed"):
        read("parquet", write_parquet(tmp_path / "null.parquet", text=["a", None]))
    with pytest.raises(DataError, match=r"number\.parquet: row 1: 'text' is int where text is needed"):
        read("parquet", write_parquet(tmp_path / "number.parquet", text=[1]))
    broken = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    with pytest.raises(DataError, match=r"latin\.parquet: row 2: the parquet file cannot be read .*utf-8"):
        read("parquet", write_parquet(tmp_path / "latin.parquet", text=broken))


def test_unreadable_file_is_named(tmp_path):
    """A dangling read fails the same way for root, whom permissions do not stop."""
    (tmp_path / "a.txt").write_text("a")
    data = DataConfig(kind="text", path=str(tmp_path))
    files = find_files(data)
    os.remove(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(No such file or directory\)"):
        list(read_documents(data, files.values()))
