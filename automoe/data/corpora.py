"""Documents out of files: this Python's own library, plain text, JSON lines, parquet; ``.gz`` and
``.zst`` too."""

from __future__ import annotations

import codecs
import glob
import hashlib
import inspect
import io
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from automoe.config.data_schema import CHAT_KINDS, DataConfig
from automoe.config.hub import is_data_set
from automoe.config.plugins import registered
from automoe.errors import ConfigError, DataError, listed

# Not library sources: tests (some hold deliberately broken encodings), installed packages, caches.
_STDLIB_SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# What a folder may hold besides files of records that are not asked for: a README, a schema, but no
# second corpus.
_RECORDS = re.compile(r"\.(parquet|jsonl(\.gz|\.zst)?)$")
_PART_BYTES = 1 << 20  # of a text file at a time


@dataclass(frozen=True)
class Document:
    """A document, or a part of one, and where it stands; parts of one document follow one
    another."""

    text: str
    file: int  # index in the corpus's list of files
    line: int  # 1-based line of a JSONL file or row of a parquet file; 0: the whole file


@dataclass(frozen=True)
class Source:
    """How files of one kind are found and read.

    Attributes:
        pattern: glob of the files that count where ``data.path`` is a directory.
        read: gives (line or row, text) of each document of a file. The line is 0 where the document
            is the file, whose text may then come in several parts, one after the other. Takes the
            path and ``data.text_key``. Raises DataError.
    """

    pattern: str
    read: Callable[[Path, str], Iterator[tuple[int, str]]]


def source_of(kind: str) -> Source:
    """The source that ``data.kind`` names: one of automoe's own, or a plugin's."""
    return _SOURCES[kind] if kind in _SOURCES else registered("data.kind")[kind]


def reader_digest(kind: str) -> str:
    """What stands for the code that reads ``kind`` in the name of a tokenised corpus; empty for
    automoe's own."""
    if kind in _SOURCES or kind in CHAT_KINDS:
        return ""
    try:
        return hashlib.sha256(Path(inspect.getfile(source_of(kind).read)).read_bytes()).hexdigest()
    except TypeError as error:  # a partial, an object that can be called
        rule = (
            f"its code cannot be told from other code, so no tokenised text could be kept: {error}"
        )
        raise ConfigError(
            "data.kind", kind, rule, "Give its Source a plain function to read with"
        ) from error


def find_files(data: DataConfig) -> dict[str, Path]:
    """The corpus's files by their names relative to what they share, in one order on every machine
    and rank.

    Raises:
        ConfigError: ``data.path`` is not set.
        DataError: nothing is found there, or a directory of records in several formats.
    """
    if data.path is not None and (data.kind == "hub" or data.is_chat and is_data_set(data.path)):
        from automoe.data.hub import hub_files

        return hub_files(data)
    if data.kind == "stdlib" or data.kind in CHAT_KINDS and data.kind.startswith("stdlib"):
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = _stdlib_sources(root) if data.kind == "stdlib" else list(root.glob("*.py"))
        problem = "this Python has no library sources. Set data.kind=text and data.path."
    elif data.path is None:
        raise ConfigError(
            "data.path",
            None,
            f"data.kind={data.kind} reads a file, a directory or a glob",
            "Set data.path, or data.kind=stdlib for text that every machine has.",
        )
    elif (root := Path(data.path).expanduser()).is_dir():
        suffix = _CHAT_PATTERN if data.is_chat else source_of(data.kind).pattern
        paths = _files_below(root, data.kind, suffix)
        problem = f"no {suffix} file in this directory. Correct data.path or data.kind."
    else:
        found = [str(root)] if root.is_file() else glob.glob(str(root), recursive=True)
        paths = [Path(name) for name in found if os.path.isfile(name)]
        problem = f"no file, directory or glob match of this name (looked from {Path.cwd()}). Correct data.path."
        if paths:
            root = Path(os.path.commonpath([p.parent for p in paths]))
    if not paths:
        raise DataError(f"{root}: {problem}")
    return dict(sorted((p.relative_to(root).as_posix(), p) for p in paths))


def _stdlib_sources(root: Path) -> list[Path]:
    """The library's Python files; what is installed beside it, ten times as many files, is not
    looked into."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _STDLIB_SKIP]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


def _files_below(root: Path, kind: str, pattern: str) -> list[Path]:
    """Visible files of a directory whose names match; of automoe's own kinds of records, compressed
    ones too."""
    visible = [
        path for path in root.rglob("*") if "/." not in f"/{path.relative_to(root).as_posix()}"
    ]
    patterns = [pattern, *(f"{pattern}{end}" for end in _CODECS if kind in _SOURCES)]
    if kind in ("jsonl", "parquet", *CHAT_KINDS):
        formats = {
            match[0]: path.name for path in sorted(visible) if (match := _RECORDS.search(path.name))
        }
        if len(formats) > 1:
            raise DataError(
                f"{root}: files of {len(formats)} formats, such as {listed(formats.values())}, and one may be a copy "
                f"of another. Name those that count with a glob: data.path='{root}/**/{pattern.split()[0]}'"
            )
    matches = (
        _RECORDS.search if kind in CHAT_KINDS else lambda name: any(map(Path(name).match, patterns))
    )
    for path in (path for path in sorted(visible) if path.is_symlink()):
        if matches(path.name) and not path.exists():
            raise DataError(f"{path}: a link to nothing. Bring back the file, or remove the link.")
        if path.is_dir() and not path.resolve().is_relative_to(root.resolve()):
            raise DataError(
                f"{path}: a link to a folder elsewhere. A glob with ** follows it; or remove it."
            )
    found = sorted(
        (path for path in visible if matches(path.name) and path.is_file()), key=Path.is_symlink
    )
    # a link beside its file is no second one
    return list({path.resolve(): path for path in reversed(found)}.values())


def open_file(path: Path) -> BinaryIO:
    """The bytes of a file, those inside of ``.gz`` and ``.zst``. Damage is an OSError where it is
    read."""
    if path.suffix not in _CODECS:
        return path.open("rb")
    import pyarrow

    stream: Any = pyarrow.input_stream(str(path), compression=_CODECS[path.suffix])
    return io.BufferedReader(stream, _PART_BYTES)


def read_documents(data: DataConfig, paths: Iterable[Path]) -> Iterator[Document]:
    """Every document in order, up to ``data.max_bytes`` of text.

    Documents without any text are left out; a file that holds nothing else is an error.

    Raises:
        DataError: bad UTF-8, a malformed line, a missing key or column, an empty or unreadable
            file.
    """
    read = source_of(data.kind).read
    left = data.max_bytes
    for index, path in enumerate(paths):
        found = False
        try:
            for line, text in read(path, data.text_key):
                if not text:
                    continue
                found = True
                if left is not None:
                    raw = text.encode()
                    # The cut may fall inside a character, which is dropped with the rest.
                    text = raw[:left].decode(errors="ignore")
                    left -= len(raw)
                if text:
                    yield Document(text, index, line)
                if left is not None and left <= 0:
                    return
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror or error}). Check the file."
            ) from error
        # The library has empty __init__.py files; in a user's corpus an empty file is a mistake.
        if not found and data.kind != "stdlib":
            raise DataError(
                f"{path}: the file is empty. Remove it from data.path, or write it again."
            )


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason}). Convert the file "
        f"(iconv -f latin1 -t utf-8, if that is what it is) or leave it out of data.path."
    )


def _read_text(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with open_file(path) as file:
        while True:
            raw = file.read(_PART_BYTES)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _not_utf8(
                    path, line + error.object.count(b"\n", 0, error.start), error
                ) from error
            line += text.count("\n")
            yield 0, text
            if not raw:
                return


def jsonl_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line that is not blank. Raises DataError, and OSError for a file that
    cannot be read."""
    with open_file(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from error
            if not line:
                continue
            if number == 1 and line.startswith("["):
                raise DataError(
                    f"{path}:1: a JSON array, where each line is one JSON object. Write its items as lines "
                    f"(jq -c '.[]' {path.name} > {path.name.partition('.')[0]}.jsonl)."
                )
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = str(error)
                if isinstance(error, json.JSONDecodeError):  # its own "line 1" would mislead
                    why = f"{error.msg} at column {error.colno}"
                raise DataError(
                    f"{path}:{number}: not valid JSON ({why}). Each line is one JSON object; correct this line or "
                    f"remove it."
                ) from error
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}:{number}: a {type(record).__name__} where each line must be one JSON object. Correct "
                    f"this line or remove it."
                )
            yield number, record


def _read_jsonl(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    for number, record in jsonl_records(path):
        if text_key not in record:
            raise DataError(
                f"{path}:{number}: no key {text_key!r}; this line has {listed(record, 10) or 'none'}. Set "
                f"data.text_key to the key that holds the text."
            )
        yield number, _checked(record[text_key], f"{path}:{number}", text_key)


def parquet_records(
    path: Path, columns: list[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, column -> value) of each row, from 1. Raises DataError.

    Args:
        path: parquet, or a stream of Arrow batches (``.arrow``), as ``datasets`` keeps them.
        columns: those that are read; None: all.
    """
    import pyarrow

    if path.stat().st_size == 0:
        return
    row = 0
    kind = path.suffix.removeprefix(".") or "parquet"
    try:
        for names, batch in _batches(path, columns):
            for column in columns or ():
                if column not in names:
                    raise DataError(
                        f"{path}: no column {column!r}; this file has {listed(names, 10) or 'none'}. Set "
                        f"data.text_key to the column that holds the text."
                    )
            if batch is None:
                continue
            arrays = {name: batch.column(name) for name in columns or names}
            for place in range(batch.num_rows):
                row += 1
                yield row, {name: array[place].as_py() for name, array in arrays.items()}
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: row {row}: text is not UTF-8 ({error.reason}). Write the row again."
        ) from error
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path}: not a readable {kind} file, after row {row} ({error}). Copy or write the file again."
        ) from error


def _batches(path: Path, columns: list[str] | None) -> Iterator[tuple[list[str], Any]]:
    """(all columns of the file, a batch); the first batch is None, since a file may have none."""
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix == ".arrow":
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            yield stream.schema.names, None
            for batch in stream:
                yield stream.schema.names, batch
        return
    with pyarrow.parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        yield names, None
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            yield names, batch


def _read_parquet(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    for row, record in parquet_records(path, [text_key]):
        yield row, _checked(record[text_key], f"{path}: row {row}", text_key)


_SOURCES = {
    "stdlib": Source("*.py", _read_text),
    "text": Source("*", _read_text),
    "jsonl": Source("*.jsonl", _read_jsonl),
    "parquet": Source("*.parquet", _read_parquet),
    "hub": Source("*.arrow", _read_parquet),
}
_CHAT_PATTERN = "*.jsonl or *.parquet"


def _checked(value: object, where: str, text_key: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {text_key!r} is {type(value).__name__} where text is needed. Correct it, or set data.text_key."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {text_key!r} has half of a surrogate pair (\\u{ord(value[error.start]):04x}) at character "
            f"{error.start}, which is not text. Correct the escape."
        ) from error
    return value
