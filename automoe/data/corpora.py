"""Documents read from files: Python's standard library, plain text, JSON lines, parquet and Arrow.

Text and JSON lines may be compressed (``.gz``, ``.zst``).
"""

from __future__ import annotations

import codecs
import hashlib
import inspect
import io
import json
import os
import re
import shlex
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from automoe.config.data_schema import CHAT_KINDS, DataConfig
from automoe.config.hub import is_data_set
from automoe.config.paths import matches
from automoe.config.plugins import registered
from automoe.errors import ConfigError, DataError, listed
from automoe.storage.foreign import MAX_DEPTH, MAX_RECORD_BYTES, check_depth, unique
from automoe.storage.guarded import doing

T = TypeVar("T")
Record = dict[str, Any]  # object of a JSON line, or columns of a table's row
NumberedRecords = Iterator[tuple[int, Record]]  # with the 1-based line or row of each

# Folders of the library that are left out: tests (some have deliberately broken encodings),
# installed packages, caches.
_STDLIB_SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# A folder of records may hold other files, such as a README or a schema, but no second format.
_RECORDS = re.compile(r"\.(parquet|jsonl(\.gz|\.zst)?)$")
# Latin letters of UTF-16 and UTF-32 are valid UTF-8, with zero bytes between them.
_WIDE = re.compile(rb"(\0+[^\0]){4}|([^\0\n]\0+){4}")
_PART_BYTES = 1 << 20  # bytes of a text file read at a time


@dataclass(frozen=True)
class Document:
    """Text to tokenise with its place in the corpus: a document, or a piece of a very long one.

    The pieces of a document are consecutive and have the same file and line.

    Attributes:
        file: index of the file in the corpus's list of files.
        line: 1-based line or row in the file; 0 if the document is the whole file.
    """

    text: str
    file: int  # index in the corpus's list of files
    line: int  # 1-based line of a JSONL file or row of a parquet file; 0: the whole file


@dataclass(frozen=True)
class Source:
    """Way to find and read the files of one ``data.kind``.

    Attributes:
        pattern: glob of the files to read if ``data.path`` is a directory.
        read: function of a path and ``data.text_key`` that yields (line or row, document), where
            the document is a text, or a dict whose ``data.text_key`` is the text. If the file is
            one document, the line is 0, and the text may come in several consecutive parts.
    """

    pattern: str
    read: Callable[[Path, str], Iterable[tuple[int, str | dict[str, Any]]]]


def source_of(kind: str) -> Source:
    """Return the ``Source`` of a ``data.kind``: how its files are found and read.

    Args:
        kind: one of automoe's own kinds, such as ``jsonl``, or the name of a plugin's.
    """
    return _SOURCES[kind] if kind in _SOURCES else registered("data.kind")[kind]


def reader_digest(kind: str) -> str:
    """Return a hash of the plugin code that reads ``data.kind``; "" for automoe's own kinds.

    The hash is part of the cached corpus's name, so that changed code reads the files again.

    Raises:
        ConfigError: the plugin's reader has no source file, e.g. a partial or a callable object.
    """
    if kind in _SOURCES or kind in CHAT_KINDS:
        return ""
    try:
        return hashlib.sha256(Path(inspect.getfile(source_of(kind).read)).read_bytes()).hexdigest()
    except TypeError as error:
        raise ConfigError(
            "data.kind",
            kind,
            f"its code cannot be identified, so tokenised text could not be cached: {error}",
            "Give its Source a plain function as reader",
        ) from error


def find_files(data: DataConfig) -> dict[str, Path]:
    """Return the corpus's files: path relative to their common folder -> path.

    The order is the same on every machine and rank. Keys of a Hub data set are ``NUMBER-FILE``.

    Raises:
        DataError: no file is found, or a directory has records in several formats or a broken link.
    """
    assert data.path or data.kind in _STDLIB_KINDS, "validation requires a path"
    if data.kind in _STDLIB_KINDS:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = list(root.glob("*.py"))
        for folder, below, names in os.walk(root) if data.kind == "stdlib" else ():
            # Installed packages can be ten times as many files.
            below[:] = [name for name in below if name not in _STDLIB_SKIP]
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        problem = "this Python has no library sources. Set data.kind=text and data.path."
    elif data.kind == "hub" or data.is_chat and is_data_set(data.path or ""):
        from automoe.data.hub import hub_files

        return hub_files(data)
    elif (root := Path(data.path or "").expanduser()).is_dir():
        suffix = _CHAT_PATTERN if data.is_chat else source_of(data.kind).pattern
        paths = _files_below(root, data.kind, suffix)
        problem = f"no {suffix} file in this directory. Correct data.path or data.kind."
    else:
        paths = [Path(name) for name in matches(str(root)) if os.path.isfile(name)]
        problem = f"no file, directory or glob match of this name (looked from {Path.cwd()}). Correct data.path."
        if paths:
            root = Path(os.path.commonpath([p.parent for p in paths]))
    if not paths:
        raise DataError(f"{root}: {problem}")
    return dict(sorted((p.relative_to(root).as_posix(), p) for p in paths))


def _files_below(root: Path, kind: str, pattern: str) -> list[Path]:
    """Return the files below a directory that match the glob ``pattern``, without hidden ones.

    Args:
        kind: value of ``data.kind``. For ``text``, ``jsonl`` and the like, which automoe reads
            itself, compressed files (``.gz``, ``.zst``) match too. For conversations, JSON lines
            and parquet match, whatever ``pattern`` is.

    Raises:
        DataError: records have several formats, or a link is broken or leads to a folder elsewhere.
    """
    visible = sorted(
        path for path in root.rglob("*") if "/." not in f"/{path.relative_to(root).as_posix()}"
    )

    def matches(path: Path) -> bool:
        if kind in CHAT_KINDS:
            return _RECORDS.search(path.name) is not None
        packed = kind in _SOURCES and path.suffix in _CODECS
        return path.with_suffix("").match(pattern) if packed else path.match(pattern)

    if kind in ("jsonl", "parquet", *CHAT_KINDS):
        formats = {match[0]: path.name for path in visible if (match := _RECORDS.search(path.name))}
        if len(formats) > 1:
            setting = shlex.quote(f'data.path="{root}/**/{pattern.split()[0]}"')
            raise DataError(
                f"{root}: files of {len(formats)} formats, such as {listed(formats.values())}, and one may be a copy "
                f"of another. Name those to read with a glob: {setting}"
            )
    for path in filter(Path.is_symlink, visible):
        if matches(path) and not path.exists():
            raise DataError(f"{path}: a broken link. Bring back the file, or remove the link.")
        if path.is_dir() and not path.resolve().is_relative_to(root.resolve()):
            raise DataError(
                f"{path}: a link to a folder elsewhere. Use a glob with **, which follows it, or remove it."
            )
    paths = [path for path in visible if matches(path) and path.is_file()]
    paths.sort(key=Path.is_symlink)
    # A link to a file of the same folder does not repeat the file.
    return list({path.resolve(): path for path in reversed(paths)}.values())


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, decompressing ``.gz`` and ``.zst``.

    Reading a damaged archive raises OSError.
    """
    file = path.open("rb")
    if path.suffix in _CODECS:
        import pyarrow

        stream = pyarrow.input_stream(file, compression=_CODECS[path.suffix])
        file = io.BufferedReader(stream, _PART_BYTES)
    return file


def read_files(
    paths: Iterable[Path], read: Callable[[Path], Iterable[tuple[int, T]]], may_be_empty: bool
) -> Iterator[tuple[int, Path, int, T]]:
    """Yield (index of the file, its path, line, record) for every record of several files.

    Empty texts are left out, and do not count as records.

    Args:
        read: function of a path that yields (line, record) for each record of the file.
        may_be_empty: True if a file may have no records.

    Raises:
        DataError: a file cannot be read, or has no records although it must.
    """
    for index, path in enumerate(paths):
        any_text = False
        doing(f"{path}: reading")
        try:
            for line, record in read(path):
                if record != "":
                    any_text = True
                    yield index, path, line, record
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror or error}). Check the file."
            ) from error
        if not any_text and not may_be_empty:
            raise DataError(
                f"{path}: the file is empty. Remove it from data.path, or write it again."
            )


def read_documents(data: DataConfig, paths: Iterable[Path]) -> Iterator[Document]:
    """Yield every document of the files in order, up to ``data.max_bytes`` of text.

    Raises:
        DataError: the text is malformed (bad UTF-8, a bad line, a missing key or column), or a file
            has no text or cannot be read.
    """
    read = source_of(data.kind).read
    left = data.max_bytes
    # The library has empty __init__.py files; in a user's corpus an empty file is a mistake.
    for file, _, line, text in read_files(
        paths, lambda path: _texts(path, read, data.text_key), data.kind == "stdlib"
    ):
        if left is not None:
            raw = text.encode()
            # The cut may fall inside a character, which is dropped with the rest.
            text = raw[:left].decode(errors="ignore")
            left -= len(raw)
        if text:
            yield Document(text, file, line)
        if left is not None and left <= 0:
            return


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason}). Convert the file "
        "(iconv -f latin1 -t utf-8; or -f utf-16), or leave it out of data.path."
    )


def _read_text(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with open_file(path) as file:
        while True:
            raw = file.read(_PART_BYTES)
            try:
                # Almost no text has a zero byte; the pattern alone takes as long as tokenising.
                if b"\0" in raw and (wide := _WIDE.search(raw)):
                    raise UnicodeDecodeError("", raw, *wide.span(), "part of a letter")
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _not_utf8(
                    path, line + error.object.count(b"\n", 0, error.start), error
                ) from error
            line += text.count("\n")
            yield 0, text
            if not raw:
                return


def jsonl_records(path: Path) -> NumberedRecords:
    """Yield (1-based line, object) for each line of a JSON-lines file that is not blank.

    Raises:
        DataError: a line is too long, not UTF-8, or no JSON object.
        OSError: the file cannot be read.
    """
    with open_file(path) as file:
        lines = iter(partial(file.readline, MAX_RECORD_BYTES), b"")
        for number, raw in enumerate(lines, start=1):
            if len(raw) == MAX_RECORD_BYTES:
                raise DataError(
                    f"{path}:{number}: a line of more than {MAX_RECORD_BYTES:,} bytes. Write it again."
                )
            try:
                if b"\0" in raw:
                    raise UnicodeDecodeError("", raw, 0, 1, "part of a letter")
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from error
            if not line:
                continue
            if number == 1 and line.startswith("["):
                raise DataError(
                    f"{path}:1: a JSON array; each line must be one JSON object. Write its items as lines of another "
                    "file (jq -c '.[]')."
                )
            try:
                record = _parsed(line)
            except (ValueError, RecursionError) as error:
                why = str(error)
                if isinstance(error, json.JSONDecodeError):  # Its "line 1" would mislead.
                    why = f"{error.msg} at column {error.colno}"
                raise DataError(
                    f"{path}:{number}: not valid JSON ({why}). Each line is one JSON object; correct this line or "
                    "remove it."
                ) from error
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}:{number}: a {type(record).__name__} where each line must be one JSON object. Correct "
                    "this line or remove it."
                )
            yield number, record


def _parsed(text: str) -> Any:
    """Parse JSON text; refuse repeated keys and deep nesting.

    Raises:
        ValueError, RecursionError: the text is not JSON, repeats a key or is nested too deep.
    """
    value = json.loads(text, object_pairs_hook=unique)
    if text.count("{") + text.count("[") > MAX_DEPTH:
        check_depth(value)
    # An escape that may be half of a surrogate pair, which is no text
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parquet_records(
    path: Path, columns: list[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based row, column -> value) for each row of a table file.

    Args:
        path: parquet file, or a stream of Arrow batches (``.arrow``) as ``datasets`` writes it.
        columns: columns to read; None: all.

    Raises:
        DataError: the file is damaged, lacks a column or has two of one name, a row is too large, a
            text is not UTF-8, or a value of a JSON column is not valid JSON.
    """
    import pyarrow.ipc
    import pyarrow.parquet

    if path.stat().st_size == 0:
        return
    row = 0
    kind = path.suffix.removeprefix(".") or "parquet"
    try:
        if kind == "arrow":
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            names = batches.schema.names
        else:
            table = pyarrow.parquet.ParquetFile(path)
            names = table.schema_arrow.names
            batches = table.iter_batches(batch_size=1024, columns=columns)
        if len(set(names)) < len(names):
            raise DataError(
                f"{path}: columns with the same name: {listed(names, 10)}. Rename them."
            )
        for column in columns or ():
            if column not in names:
                raise DataError(
                    f"{path}: no column {column!r}; this file has {listed(names, 10) or 'none'}. Set "
                    "data.text_key to the column that holds the text."
                )
        for batch in batches:
            if kind == "arrow":
                batch.validate(full=True)  # Its offsets may lead out of its buffers.
            arrays = {name: batch.column(name) for name in columns or names}
            large = batch.nbytes > MAX_RECORD_BYTES
            for place in range(batch.num_rows):
                row += 1
                if large and (size := batch.slice(place, 1).nbytes) > MAX_RECORD_BYTES:
                    raise DataError(
                        f"{path}: row {row} has {size:,} bytes; at most {MAX_RECORD_BYTES:,} are read. Write it again."
                    )
                yield row, {name: _python(array[place]) for name, array in arrays.items()}
    except DataError:
        raise
    except (pyarrow.ArrowException, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: row {row}: the {kind} file cannot be read ({error}). Write it again."
        ) from error


def _python(value: Any) -> Any:
    """Return an Arrow scalar as a Python value; values of Arrow's JSON type are parsed.

    ``datasets`` stores values of several types or keys in JSON columns. A text column stays text,
    even if its text happens to be JSON.
    """
    import pyarrow

    while isinstance(
        value, (pyarrow.DictionaryScalar, pyarrow.RunEndEncodedScalar, pyarrow.UnionScalar)
    ):
        value = value.value
    if value is None or not value.is_valid:
        return None
    if isinstance(value, pyarrow.MapScalar):
        return dict(map(_python, entry.values()) for entry in value.values)
    if isinstance(value, pyarrow.StructScalar):
        return {name: _python(entry) for name, entry in value.items()}
    if isinstance(value, pyarrow.ListScalar):
        return [_python(entry) for entry in value.values]
    if isinstance(value, pyarrow.JsonScalar):
        return _parsed(value.as_py())
    return value.as_py()


def _texts(path: Path, read: Callable, text_key: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each record of a file.

    Args:
        read: function of ``path`` and ``text_key`` that yields (line, record); a record is a text,
            or a dict with the text at ``text_key``.

    Raises:
        DataError: a record has no text.
    """
    sep = ": row " if path.suffix in (".parquet", ".arrow") else ":"
    for line, record in read(path, text_key):
        if isinstance(record, str):
            yield line, record
            continue
        place = f"{path}{sep}{line}"
        if text_key not in record:
            raise DataError(
                f"{place}: no key {text_key!r}; this record has {listed(record, 10) or 'none'}. Set "
                "data.text_key to the key that holds the text."
            )
        text = record[text_key]
        if not isinstance(text, str):
            raise DataError(
                f"{place}: {text_key!r} is {type(text).__name__} where text is needed. Correct it, or set data.text_key."
            )
        yield line, text


_SOURCES = {
    "stdlib": Source("*.py", _read_text),
    "text": Source("*", _read_text),
    "jsonl": Source("*.jsonl", lambda path, text_key: jsonl_records(path)),
    "parquet": Source("*.parquet", lambda path, text_key: parquet_records(path, [text_key])),
    "hub": Source("*.arrow", lambda path, text_key: parquet_records(path, [text_key])),
}
_CHAT_PATTERN = "*.jsonl or *.parquet"
_STDLIB_KINDS = ("stdlib", "stdlib_chat", "stdlib_preference")
