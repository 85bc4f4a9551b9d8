"""Files of a checkpoint that are flushed and hashed while torch writes them."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from automoe.passes.trace import phase
from automoe.storage.files import named


class HashingStream(io.RawIOBase):
    """New file of a checkpoint whose content is hashed as it is written.

    A write error is kept and raised by ``seal``: torch's serializer calls ``write`` from C++ code
    that an exception would leave half done.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
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
            rest = view
            try:
                with named(self._path, self._size):
                    while rest:
                        rest = rest[self._file.write(rest) :]
            except Exception as error:
                self._error = error
        return len(view)

    def tell(self) -> int:
        return self._size

    def seal(self) -> dict[str, Any]:
        """Flush the file to the disk; return its size (``bytes``) and XXH3 digest (``xxh128``).

        Raises:
            OSError: the file could not be written or flushed.
        """
        if self._error is not None:
            raise self._error
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "xxh128": self._digest.hexdigest()}

    def release(self) -> None:
        """Close the file for good.

        ``close`` leaves it open, because torch calls ``close`` before ``seal`` has flushed the
        file.
        """
        self._file.close()


class HashingFileSystem(FileSystem):
    """File system for torch.distributed.checkpoint whose new files are flushed and hashed.

    Args:
        step: number of the optimizer step that is saved, which traces show beside each write.

    Attributes:
        facts: by file name, size (``bytes``) and XXH3 digest (``xxh128``) of every file written so
            far.
    """

    def __init__(self, step: int) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
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
