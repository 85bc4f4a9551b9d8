"""Headers of safetensors files: names, dtypes, shapes and byte ranges of tensors. Needs no torch.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range)
and the tensors' bytes, without holes: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import accumulate, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from automoe.config.hub import local_folder
from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError, listed, retried
from automoe.hf.families.as_transformers import damaged
from automoe.hf.keys import EMBEDDING, FP8_BLOCK, GROUP, HEAD, INDEX_FILE, Encoding, Shape
from automoe.hf.schemes import FORMATS
from automoe.model.params import count_params
from automoe.storage.files import explained, named
from automoe.storage.foreign import (
    brief,
    is_there,
    open_inside,
    parse_json,
    read_bytes,
    read_settings,
)

SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # same limit as in the safetensors library
ADAPTER = "adapter_config.json"
COPY_AGAIN = "Make it readable, or copy it again"  # remedy for a file that cannot be read
_PART = 16 << 20  # bytes read at once
MANY = 10_000  # layers, or experts of a layer
# Bits per number, by the dtype's name in safetensors.
BITS = dict.fromkeys(
    ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
)
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
BITS |= dict.fromkeys(("I32", "U32", "F32"), 32) | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
_LFS_MARK = b"version https://git-lfs.github.com"
SHAPE = "_shape"  # suffix of the tensor that holds the two sizes of a packed matrix


class StoredTensor(NamedTuple):
    """One tensor in the files of a checkpoint.

    Attributes:
        file: name of its file.
        dtype: dtype in the spelling of safetensors (``BF16``).
        shape: shape of the stored numbers or codes.
        start, num_bytes: byte range in the file.
        scales: scales of quantized codes; None if not quantized. Their own ``scales`` is a third
            tensor that some formats have: codes of zero, or a divisor of the scales.
        encoding: rule that turns codes and scales into numbers.
    """

    file: str
    dtype: str
    shape: Shape
    start: int
    num_bytes: int
    scales: StoredTensor | None = None
    encoding: Encoding = "plain"

    def __reduce__(self) -> tuple[Any, ...]:  # half the time of a NamedTuple's own pickling
        return StoredTensor, tuple(self)

    @property
    def full_shape(self) -> Shape:
        """Shape of the dequantized tensor."""
        if self.encoding == "plain":
            return self.shape
        if self.encoding != "mxfp4":
            return *self.shape[:-1], FORMATS[self.encoding].packed * self.shape[-1]
        *lead, rows, groups, half = self.shape
        return *lead, 2 * groups * half, rows

    @property
    def total_bytes(self) -> int:
        """Size in bytes, scales included."""
        return sum(part.num_bytes for part in self.in_file("").values())

    def in_file(self, key: str) -> Contents:
        """Return the entries of a file's header that store this tensor, in byte order.

        These are the tensor itself, or its codes and scales, and in INT4 also its shape.

        Args:
            key: name that this tensor has, or would have without quantization.
        """
        if self.scales is None:
            return {key: self}
        codes, scales, *_ = FORMATS[self.encoding]
        parts = {key + codes: self, key + scales: self.scales}
        if self.encoding == "int4":
            parts[key + SHAPE] = StoredTensor("", "I64", (len(self.shape),), 0, 8 * len(self.shape))
        return parts

    @property
    def row_layout(self) -> tuple[int, int]:
        """Number of rows of each stored matrix, and size of a row in bytes.

        A vector is a matrix with one column. A row of MXFP4 codes is [groups, 16].
        """
        rows = self.shape[:-2] if self.encoding == "mxfp4" else self.shape[:-1] or self.shape
        return rows[-1], self.num_bytes // math.prod(rows)


NONE = StoredTensor("", "", (), 0, 0)  # stands for a tensor that is not there
Contents = dict[str, StoredTensor]  # tensors by name, in the order of files and bytes


@lru_cache
def _layout(dtype: str, *shape: int) -> tuple[str, Shape, int]:
    """Return the given dtype and shape, and the size in bytes of such a tensor.

    Results are cached: the headers of many equal tensors share the same objects, which saves
    memory.
    """
    return dtype, shape, math.prod(shape) * BITS[dtype] // 8


def coded_shapes(
    shape: Shape, encoding: Encoding, block: tuple[int, int] = FP8_BLOCK
) -> tuple[Shape, Shape]:
    """Return the shapes of the codes and of the scales that store a tensor [..., R, C].

    Codes are [..., R, C / numbers in a stored element], scales [..., row blocks, column blocks]. But
    ``mxfp4`` (GPT-OSS) stores the transposed tensor: codes [..., C, R / 32, 16], scales [..., C, R / 32].

    Args:
        block: rows and columns that share a scale; without effect for ``mxfp4``.
    """
    *lead, rows, cols = shape
    if encoding == "mxfp4":
        scales = (*lead, cols, rows // GROUP)
        return (*scales, GROUP // 2), scales
    codes = (*lead, rows, cols // FORMATS[encoding].packed)
    return codes, (*lead, -(-rows // block[0]), -(-cols // block[1]))


@contextmanager
def switched_off(
    is_on: Callable[[], bool], off: Callable[[], None], on: Callable[[], None]
) -> Iterator[None]:
    """Switch a process setting off in the block, by ``off()``; then call ``on()`` if ``is_on()`` was True."""
    was_on = is_on()
    off()
    try:
        yield
    finally:
        if was_on:
            on()


# While a hundred thousand objects are made, Python's collector would scan all of torch's objects
# again and again.
without_collection = partial(switched_off, gc.isenabled, gc.disable, gc.enable)


@without_collection()
def read_headers(path: str | Path, last: bool = False, partial_ok: bool = False) -> Contents:
    """Return file, dtype, shape and byte range of each tensor in a checkpoint directory, by name.

    Args:
        last: True if transformers will read the files. It reads a tensor that two files contain
            from the last one, whatever the index says, so both must then contain the same numbers.
        partial_ok: True to return {} if files are missing.

    Raises:
        CheckpointError: the directory does not exist, or one of its files is missing; a file is
            truncated, a Git LFS pointer, not safetensors, not a regular file, or a link out of the
            directory; tensors overlap, leave holes, or differ in size from their shape; two files
            contain a tensor, and the index names neither; the index names a file without the
            tensor; or the index does not name a ``model.safetensors`` that exists.
    """
    folder = local_folder(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such directory. Name a HuggingFace checkpoint directory"
        )
    with explained(folder, COPY_AGAIN):
        return retried(lambda: _read_all(folder, last, partial_ok))


def _read_all(folder: Path, last: bool, partial_ok: bool) -> Contents:
    index = _read_index(folder)
    files = _files_of(index)
    if missing := [name for name in files if not is_there(folder, name)]:
        if partial_ok:
            return {}
        named_by = f"that {INDEX_FILE} names" if index else f"of a model without {INDEX_FILE}"
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(files)} files {named_by} are missing: {listed(missing)}. "
            "Name a directory with safetensors files, or copy them again"
        )
    tensors: Contents = {}
    for file in files:
        header = _read_header(folder, file)
        for name in sorted(header.keys() & tensors.keys()):
            counts = index.get(name)
            differ = last and not are_equal(folder, tensors[name], folder, header[name])
            if differ or counts not in (tensors[name].file, file):
                raise CheckpointError(
                    f"{folder}: {brief(name)} is in {tensors[name].file} and in {file}. Either nothing says which one "
                    "counts, or transformers takes the last, which has other numbers. Copy the checkpoint again"
                )
            if counts != file:
                del header[name]
        tensors |= header
    if SINGLE_FILE not in files and is_there(folder, SINGLE_FILE):
        raise CheckpointError(
            f"{folder}: {SINGLE_FILE} is there, and {INDEX_FILE} names other files. transformers reads only the first, "
            "and automoe what the index names. Remove the one that does not count"
        )
    lost = [name for name, file in index.items() if tensors.get(name, NONE).file != file]
    if lost:
        raise CheckpointError(
            f"{folder}: {len(lost)} tensors are not in the file that {INDEX_FILE} names: {listed(lost)}. "
            "The index belongs to other files: copy the checkpoint again"
        )
    return tensors


def unread_adapter(folder: Path) -> list[str]:
    """Return a note if the folder holds a peft adapter, which automoe does not apply; else []."""
    if not is_there(folder, ADAPTER):
        return []
    return [
        f"not read: {ADAPTER} beside the weights. Only the weights are used, in train, convert, generate and eval"
    ]


@contextmanager
def without_adapter(folder: Path) -> Iterator[Path]:
    """Yield ``folder``, or links to its files but an adapter's, which ``from_pretrained`` loads.

    Until 5.22, transformers has no option against that for a local folder.
    """
    if not is_there(folder, ADAPTER):
        yield folder
        return
    with TemporaryDirectory() as links:
        for file in folder.iterdir():
            if file.name != ADAPTER:
                Path(links, file.name).symlink_to(file.absolute())
        yield Path(links)


def base_of(folder: Path) -> str | None:
    """Return the base model, a path or Hub id, that the peft adapter in ``folder`` names.

    Return "" if it names none, and None if the folder holds a model or no adapter.
    """
    if is_there(folder, "config.json") or not is_there(folder, ADAPTER):
        return None
    with suppress(OSError, ValueError):
        return str(read_settings(folder, ADAPTER).get("base_model_name_or_path") or "")
    return ""


def has_own_head(folder: Path, tensors: Contents) -> bool:
    """Return True if the files hold an output head that differs from the embedding.

    Both are compared byte by byte, up to the first difference. The result is also True if there is
    a head and no tensor has the embedding's usual name.

    Args:
        tensors: the headers of ``folder``.
    """
    embedding = tensors.get(EMBEDDING)
    return HEAD in tensors and (
        embedding is None or not are_equal(folder, embedding, folder, tensors[HEAD])
    )


def are_equal(folder: Path, stored: StoredTensor, other_folder: Path, other: StoredTensor) -> bool:
    """Return whether ``stored`` in ``folder`` and ``other`` in ``other_folder`` have equal dtype, shape and bytes."""
    if (stored.dtype, stored.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(raw_bytes(folder, stored), raw_bytes(other_folder, other), strict=True)
    return all(mine == theirs for mine, theirs in pairs)


def raw_bytes(folder: Path, tensor: StoredTensor) -> Iterator[bytes]:
    """Yield the bytes of a stored tensor, at most 16 MiB at a time.

    Raises:
        CheckpointError: the file cannot be read, or became shorter since its header was read.
    """
    file, end = folder / tensor.file, tensor.start + tensor.num_bytes
    with explained(file, COPY_AGAIN), os.fdopen(open_inside(folder, tensor.file), "rb") as stream:
        for at in range(tensor.start, end, _PART):
            size = min(_PART, end - at)
            part = retried(partial(os.pread, stream.fileno(), size, at))
            if len(part) < size:
                raise CheckpointError(f"{file} was shortened. Copy the file again")
            yield part


def check_holds(folder: Path, config: ModelConfig, tensors: Contents) -> None:
    """Raise an error if config.json describes a model far larger than its files, so is damaged.

    Sizes are only multiplied, because a list of an absurd model's tensors could fill the memory.
    While files are missing (``tensors`` is {}), only the numbers of layers and experts are checked.

    Args:
        config: configuration read from config.json.
        tensors: headers of the files by name.

    Raises:
        ConfigError: the model has more than 10,000 layers or experts per layer, or more than twice
            as many parameters as the files hold numbers.
    """
    if (count := max(config.num_layers, config.num_experts)) > MANY:
        raise damaged(folder, f"{count:,} layers or experts, and at most {MANY:,} are read")
    if tensors:
        check_numbers(folder, count_params(config).total, tensors)


def check_numbers(folder: Path, params: int, tensors: Contents) -> None:
    """Refuse a model of ``params`` parameters if its files hold less than half as many numbers.

    Args:
        tensors: headers of the files by name.

    Raises:
        ConfigError: the model is too large for its files.
    """
    # The factor 2 allows for half of the tensors to be missing; they are then reported by name.
    # Codes of 4 bits are packed into bytes or, in INT4, into words of 32 bits.
    per_word = {"U8": 2, "I8": 2, "I32": 8}
    numbers = sum(
        math.prod(stored.shape) * per_word.get(stored.dtype, 1) for stored in tensors.values()
    )
    if params > 2 * numbers:
        raise damaged(folder, f"a model of {params:,} numbers, and its files hold {numbers:,}")


def missing_files(folder: Path) -> list[str]:
    """List the weight files of a checkpoint that do not exist or are broken links.

    Its files are those of the index or, without one, ``model.safetensors``.
    """
    return [name for name in _files_of(_read_index(folder)) if not (folder / name).exists()]


def _files_of(index: dict[str, str]) -> list[str]:
    return sorted(set(index.values())) or [SINGLE_FILE]


def _read_index(folder: Path) -> dict[str, str]:
    """Return {tensor name: file name} of the index, {} without one; raise ``CheckpointError`` if it is damaged."""
    if not is_there(folder, INDEX_FILE):
        return {}
    file = folder / INDEX_FILE
    raw = read_bytes(folder, INDEX_FILE)
    if raw.startswith(_LFS_MARK):
        raise _lfs_pointer(file, len(raw))
    try:
        index = parse_json(raw)["weight_map"]
        if not isinstance(index, dict) or {*map(type, index.values())} - {str}:
            raise TypeError("weight_map is not a mapping from tensor names to file names")
        return index
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: no index in it ({error!r}). Copy it again") from None


def _read_header(folder: Path, name: str) -> Contents:
    from safetensors import SafetensorError, safe_open

    file = folder / name
    with named(file), os.fdopen(open_inside(folder, name), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(len(_LFS_MARK))
        if start == _LFS_MARK:
            raise _lfs_pointer(file, size)
        stream.seek(8)
        # Read before the library maps the file: a failing disk gives an error here, a signal there.
        length = int.from_bytes(start[:8], "little")
        raw = stream.read(min(length, MAX_HEADER_BYTES))
    try:
        with safe_open(file, framework="np") as opened:
            # The library checks all but repeated names, and tensors follow each other without holes.
            keys, settings = opened.offset_keys(), opened.metadata()
            if raw.count(b":") != 4 * len(keys) + (0 if settings is None else 1 + len(settings)):
                parse_json(raw)
            parts = map(opened.get_slice, keys)
            layouts = [_layout(part.get_dtype(), *part.get_shape()) for part in parts]
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{file}: truncated or not a safetensors file: {size:,} bytes ({error}). Copy it again"
        ) from None
    dtypes, shapes, sizes = zip(*layouts, strict=True) if layouts else ((),) * 3
    starts = accumulate(sizes, initial=8 + length)
    fields = zip(repeat(name), dtypes, shapes, starts, sizes, repeat(None), repeat("plain"))
    return dict(zip(keys, map(partial(tuple.__new__, StoredTensor), fields), strict=True))


def _lfs_pointer(file: Path, size: int) -> CheckpointError:
    return CheckpointError(
        f"{file} is a Git LFS pointer of {size} bytes, not the file itself. "
        "Run `git lfs pull` in the checkpoint's directory"
    )
