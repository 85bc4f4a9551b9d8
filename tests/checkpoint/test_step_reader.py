"""A step directory from a stranger: nothing that its files name is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from automoe.checkpoint.reader import StepReader
from automoe.errors import CheckpointError
from automoe.export import load_step


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step with tensors of several dtypes, as torch writes it."""
    tensors = {f"{dtype}": torch.arange(6).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)}
    tensors["scalar"] = torch.tensor(3.0, dtype=torch.float64)
    dcp.save(tensors, checkpoint_id=tmp_path / "step", no_dist=True)
    return tmp_path / "step"


def rewrite(step: Path, change: Any) -> None:
    """Change the index in place, as somebody with torch can."""
    index = step / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    change(metadata)
    index.write_bytes(pickle.dumps(metadata))


def refusal(step: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        StepReader(step).read_metadata()
    return str(caught.value)


def test_what_torch_wrote_is_read(step: Path) -> None:
    tensors = {"torch.bfloat16": torch.zeros(6, dtype=torch.bfloat16), "scalar": torch.zeros((), dtype=torch.float64)}
    StepReader(step).load(tensors, no_dist=True)
    assert tensors["torch.bfloat16"].tolist() == [0, 1, 2, 3, 4, 5] and tensors["scalar"].item() == 3.0


def views(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix, its transpose, every second column, no rows, and rows from the middle of a larger one."""
    columns, rows, turned = numbers.clone()[:, ::2], torch.cat([numbers] * 3)[6:12], numbers.t().contiguous().t()
    return {"matrix": numbers, "turned": turned, "columns": columns, "none": numbers[:0], "rows": rows}


@pytest.mark.parametrize("read_as", [torch.float32, torch.bfloat16])
def test_every_layout_is_read_into_every_other(tmp_path: Path, read_as: torch.dtype) -> None:
    """Straight into its place or through memory of torch's own: the numbers are those that were saved."""
    saved = {
        f"{name}.{into}": tensor for name, tensor in views(torch.randn(6, 10)).items() for into in ("plain", "turned")
    }
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    tensors = {}
    for name, tensor in saved.items():
        zeros = torch.zeros(tensor.shape, dtype=read_as)
        tensors[name] = zeros.t().contiguous().t() if name.endswith("turned") else zeros
    StepReader(tmp_path).load(tensors, no_dist=True)
    for name, tensor in saved.items():
        assert torch.equal(tensors[name], tensor.to(read_as)), name


@pytest.mark.parametrize("where", ["state_dict_metadata", "storage_data", "planner_data", "storage_meta", "version"])
def test_code_in_the_index_is_named_and_not_run(step: Path, tmp_path: Path, where: str) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    rewrite(step, lambda metadata: setattr(metadata, where, Attack()))
    assert "names posix.mkdir, which no checkpoint needs" in refusal(step)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*names posix\.mkdir"):
        load_step(torch.nn.Linear(1, 1).state_dict(), step)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["load", "ops", "hub.load", "storage.UntypedStorage"])
def test_of_torch_itself_only_dtypes_and_sizes(step: Path, name: str) -> None:
    (step / ".metadata").write_bytes(b"ctorch\n" + name.encode() + b"\n.")
    assert f"names torch.{name}" in refusal(step)


def test_an_entry_that_is_no_tensor_would_be_unpickled_by_torch(step: Path) -> None:
    rewrite(step, lambda metadata: metadata.state_dict_metadata.update(scalar=BytesStorageMetadata()))
    assert "entries that are not tensors: ['scalar']" in refusal(step)


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd", "", ".."])
def test_a_file_outside_of_the_step(step: Path, path: str) -> None:
    def move(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    rewrite(step, move)
    assert f"names files ['{path}'" in refusal(step)


@pytest.mark.parametrize("content", [b"", b"\x80", b"}.", b"no pickle", b"\x80\x04N."])
def test_an_index_that_is_none(step: Path, content: bytes) -> None:
    (step / ".metadata").write_bytes(content)
    assert ".metadata cannot be read: " in refusal(step)


def test_an_index_that_is_missing(step: Path) -> None:
    (step / ".metadata").unlink()
    assert "FileNotFoundError" in refusal(step)
