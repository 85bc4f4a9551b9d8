"""Files that are on the disk when they are said to be, with a digest of what was meant to be written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from automoe.storage.trace import phase


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of one file. XXH3 sees what a disk did to it, at a tenth of what a copy costs."""

    bytes: int
    xxh128: str


class HashingStream(io.RawIOBase):
    """A new file that hashes what is written to it, while it is written.

    A write error is kept and raised by ``seal``: torch's serializer calls ``write`` from C++ code that
    an exception would leave half done.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._error: BaseException | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._error is None:
            self._digest.update(view)
            self._put(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def seal(self) -> FileFacts:
        """Flush to the disk, and say what was written.

        Raises:
            OSError: it was not.
        """
        if self._error is not None:
            raise self._error
        os.fsync(self._file.fileno())
        return FileFacts(self._size, self._digest.hexdigest())

    def release(self) -> None:
        """Close the file. ``close``, which torch calls before the file can be sealed, leaves it open."""
        self._file.close()

    def _put(self, view: memoryview) -> None:
        try:
            while view:
                view = view[self._file.write(view) :]
        except Exception as error:
            self._error = error


class HashingFileSystem(FileSystem):
    """torch.distributed.checkpoint's file system, whose new files are flushed and hashed.

    Args:
        step: the step that is saved.

    Attributes:
        facts: file name -> size and digest of every file written so far.
    """

    def __init__(self, step: int) -> None:
        self.facts: dict[str, FileFacts] = {}
        self._step = step

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        path = Path(path)
        with phase("write_shard" if path.suffix == ".distcp" else "write_metadata", self._step):
            stream = HashingStream(path)
            try:
                yield stream
                self.facts[path.name] = stream.seal()
            finally:
                stream.release()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.facts[Path(new_path).name] = self.facts.pop(Path(path).name)


def is_as_written(path: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a file has the content that ``facts`` of a manifest tell the digest of; earlier versions took SHA-256."""
    name, digest = ("xxh128", xxhash.xxh3_128) if "xxh128" in facts else ("sha256", hashlib.sha256)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, digest).hexdigest() == facts[name]


def write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path, stem: str) -> str | None:
    """Rename ``path`` to the first free of ``stem.1``, ``stem.2``, ... and say which; None if it is not there."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(target := path.with_name(f"{stem}.{number}")):
        number += 1
    path.rename(target)
    return target.name
