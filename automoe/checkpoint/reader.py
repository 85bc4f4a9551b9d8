"""Reader of training state that runs no code named by a checkpoint's files.

``.metadata`` of ``torch.distributed.checkpoint`` is a pickle, and torch's loader calls any function
that the pickle names. Torch also unpickles entries that are not tensors. A step may come from
somebody else (``checkpoint.resume=DIR``, ``automoe export DIR``).
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.torch_version import TorchVersion

from automoe.comm.agreement import for_all, shared_error
from automoe.errors import CheckpointError, retried
from automoe.interop.torch_private import stored_tensor
from automoe.storage.files import read_file

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {  # what torch writes into the file; none of these does more than hold values
    _METADATA: {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip
_NEWER = "A newer torch may have written it: its manifest.json says which (versions). Go on with that one"


def dcp_error(error: CheckpointException) -> Exception:
    """Return the error to raise for a failed load or save of torch.distributed.checkpoint.

    The result is the first failed rank's error, the same on every rank. ``CheckpointException``
    itself is not an ``Exception``.
    """
    return shared_error(for_all(rank, error.failures[rank][0]) for rank in sorted(error.failures))


class StepReader(dcp.FileSystemReader):
    """Reader of one step's tensors through torch.distributed.checkpoint, for untrusted files too.

    Its methods raise ``CheckpointError`` if the step's index (``.metadata``) names code, an entry
    that is no tensor, or a file outside of the step's directory.
    """

    _unread: CheckpointError | None = None  # error of read_metadata, whose text torch 2.11 drops

    @cached_property
    def _index(self) -> Metadata:
        return _read_index(Path(self.path) / ".metadata")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the step's index, which lists its tensors and their locations; arguments are ignored.

        Raises ``CheckpointError`` if the index is unreadable, or names code, a file outside of the
        step's directory, or an entry that is no tensor.
        """
        try:
            metadata = self._index
        except CheckpointError as error:
            self._unread = error
            raise
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of ``plan`` from the step's files.

        Torch reads every tensor into new memory first, and unpickles a header of each one. Here
        numbers are read straight into targets that are contiguous, on the CPU and of the stored
        dtype and shape, and a header is unpickled once if several tensors have the same one, byte
        for byte. Torch's method reads all other tensors.
        """
        others: list[ReadItem] = []
        described: dict[Any, tuple[bytes, torch.Tensor]] = {}
        places = sorted(
            ((self.storage_data[item.storage_index], item) for item in plan.items),
            key=lambda pair: (pair[0].relative_path, pair[0].offset),
        )
        for file, pairs in groupby(places, lambda pair: pair[0].relative_path):
            with self.fs.create_stream(Path(self.path, file), "rb") as stream:
                for place, item in pairs:
                    kind = place.length, item.lengths
                    front, stored = described.get(kind, (b"", None))
                    stream.seek(place.offset)
                    if stored is None or stream.read(len(front)) != front:
                        stored, begin = stored_tensor(self, stream, place)
                        stream.seek(place.offset)
                        front = stream.read(begin - place.offset)
                        described[kind] = front, stored
                    target = planner.resolve_tensor(item).detach()
                    corners = zip(item.storage_offsets, item.lengths, strict=True)
                    part = stored[tuple(slice(at, at + size) for at, size in corners)]
                    whole = part.is_contiguous() and target.is_contiguous() and target.is_cpu
                    if not whole or (part.dtype, part.shape) != (target.dtype, target.shape):
                        others.append(item)
                        continue
                    start = place.offset + len(front) + part.storage_offset() * part.itemsize
                    stream.seek(start)
                    numbers = target.view(-1).view(torch.uint8).numpy()
                    if stream.readinto(numbers) < len(numbers):
                        raise CheckpointError(f"{place.relative_path} ends too early")
                    planner.commit_tensor(item, target)
        return super().read_data(replace(plan, items=others), planner)

    def load(self, tensors: dict[str, torch.Tensor], **ranks: Any) -> None:
        """Fill ``tensors`` with the step's tensors of the same names.

        Args:
            ranks: ``process_group`` or ``no_dist`` of ``dcp.load``.

        Raises:
            CheckpointError: a tensor is missing or cannot be read; every rank raises the same
                error.
        """

        def load() -> None:
            try:
                dcp.load(tensors, storage_reader=self, **ranks)
            except CheckpointException as error:
                if isinstance(cause := dcp_error(error), OSError):
                    raise cause from None
                raise CheckpointError(
                    f"{self.path} cannot be loaded: {self._unread or cause}"
                ) from None

        try:
            retried(load)  # by all ranks, which see the same error
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be loaded: {error}") from None


def _read_index(path: Path) -> Metadata:
    try:
        metadata = _Unpickler(io.BytesIO(read_file(path))).load()
        entries = metadata.state_dict_metadata
        paths = {place.relative_path for place in metadata.storage_data.values()}
        strange = [
            name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)
        ]
        # A file in the step's directory has a path of one part.
        outside = sorted(path for path in paths if path in ("", "..") or Path(path).name != path)
        if TorchVersion(metadata.version or "0") > CURRENT_DCP_VERSION:
            raise CheckpointError(
                f"has version {metadata.version} of torch's format, and torch {torch.__version__} reads "
                f"{CURRENT_DCP_VERSION}. {_NEWER}"
            )
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # An invalid pickle can raise any exception.
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if strange or outside:
        problem = f"names files {outside[:3]}"
        if strange:
            problem = f"has entries that are not tensors: {strange[:3]}"
        raise CheckpointError(
            f"{path} {problem}. automoe writes no such checkpoint, and does not load it"
        )
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        known = f"which torch {torch.__version__} does not write: nothing of it was run"
        if module.startswith("torch.distributed.checkpoint"):
            raise CheckpointError(f"names {module}.{name}, {known}. {_NEWER}")
        raise CheckpointError(
            f"names {module}.{name}, which no checkpoint needs: it may be an attack. Nothing was run"
        )
