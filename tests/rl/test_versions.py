"""A folder of differences between versions of weights: lossless, checked, folded, whole after a kill anywhere."""

from __future__ import annotations

import os
import shutil
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import automoe
from automoe.config.schema import MeshConfig
from automoe.errors import CheckpointError
from automoe.hf.write import to_hf
from automoe.rl import versions
from automoe.rl.versions import INDEX, LOCK, WeightVersions, hash_of, read_version
from automoe.rl.weights import WeightStream
from automoe.storage.lock_file import take_lock
from automoe.verify.pool import RankPool
from tests.rl.test_weights import loaded
from tests.support.hf_models import save_small_hf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_small_hf("qwen3_moe", folder, dtype=torch.bfloat16)
    return folder


def update(model: Any, share: float, seed: int) -> None:
    """Change a share of the numbers by a little, as a step of a small learning rate does in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter.mul_(1 + 0.01 * chosen)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {key: one for file in folder.glob("*.safetensors") for key, one in load_file(file).items()}


@pytest.mark.parametrize("encoding", ["plain", "fp8"])
def test_a_chain_ends_in_the_hash_of_the_export(encoding: Any, source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    published, stream = WeightVersions(tmp_path / "versions"), WeightStream(model, 100_000, encoding=encoding)
    reader: tuple[Any, ...] = (None, None)  # follows every second version
    for step in range(5):
        update(model, 0.02, step)
        said = published.publish(stream, step)
        if step % 2 == 0:
            number, tensors = read_version(tmp_path / "versions", *reader)
            reader = tensors, number
            assert hash_of(tensors) == said
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "versions").iterdir()}
    full = max(sizes.values())
    differences = [size for name, size in sizes.items() if name.startswith("difference")]
    if encoding == "plain":  # tensors of half a kilobyte are hardly larger than a difference's name
        assert len(differences) == 4 and max(differences) < full / 4
    to_hf(model, tmp_path / "hf", encoding=encoding, verify=False)
    assert said == hash_of(exported(tmp_path / "hf")) == hash_of(read_version(tmp_path / "versions")[1])


def test_ranks_publish_together(source: Path, tmp_path: Path, ranks: RankPool) -> None:
    mesh = MeshConfig(pp=2, dp_shard=1)
    said = ranks.run(publish_twice, 2, source, tmp_path / "versions", mesh)
    assert said[0] == said[1] == hash_of(read_version(tmp_path / "versions")[1])


def publish_twice(source: Path, folder: Path, mesh: MeshConfig) -> str:
    parts = loaded(source, mesh, None)
    published = WeightVersions(folder)
    published.publish(WeightStream(parts), 0)
    with torch.no_grad():
        for part in parts.values():
            for parameter in part.parameters():
                parameter.mul_(1.5)
    return published.publish(WeightStream(parts), 1)


def test_a_chain_is_folded_before_it_outgrows_a_full_file(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    published, stream = WeightVersions(tmp_path), WeightStream(model)
    full = sum(one.num_bytes for one in stream.contents.values())
    folded = 0
    for step in range(8):
        update(model, 0.5, step)
        said = published.publish(stream, step)
        differences = sorted(tmp_path.glob("difference-*"))
        folded += not differences
        assert sum(path.stat().st_size for path in differences) < full
        assert hash_of(read_version(tmp_path)[1]) == said
    assert folded >= 2  # the first version, and a later one


def test_damage_is_found(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    stream = WeightStream(model)
    with pytest.raises(CheckpointError, match="nothing was published there"):
        read_version(tmp_path)
    for step in range(3):
        update(model, 0.02, step)
        said = WeightVersions(tmp_path).publish(stream, step)
    full = min(tmp_path.glob("weights-*"))
    flip(full, -1)
    with pytest.raises(CheckpointError, match="was published. Remove the"):
        read_version(tmp_path)
    flip(full, -1)
    assert hash_of(read_version(tmp_path)[1]) == said
    # The newest version in full, with which the next one is compared: the next one is then full too.
    flip(max(tmp_path.glob("weights-*")), -1)
    update(model, 0.02, 9)
    said = WeightVersions(tmp_path).publish(stream, 9)
    assert hash_of(read_version(tmp_path)[1]) == said and not list(tmp_path.glob("difference-*"))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGE = {"half": cut, "a bit": lambda file: flip(file, -7), "none": Path.unlink}


@pytest.mark.parametrize("prefix", ["weights", "difference"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_folder_that_cannot_be_followed_is_named(kind: str, prefix: str, source: Path, tmp_path: Path) -> None:
    """Removed, it holds the next version in full."""
    folder = tmp_path / "versions"
    model = automoe.from_hf(source)
    stream, publisher = WeightStream(model), WeightVersions(folder)
    for step in range(3):
        update(model, 0.02, step)
        publisher.publish(stream, step)
    DAMAGE[kind](min(folder.glob(f"{prefix}-*")))
    with pytest.raises(CheckpointError, match="version 2 cannot be read.*Remove the folder"):
        read_version(folder)
    shutil.rmtree(folder)
    said = publisher.publish(stream, 9)
    assert hash_of(read_version(folder)[1]) == said


def test_a_version_that_was_cut_is_not_compared_with(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    stream, publisher = WeightStream(model), WeightVersions(tmp_path)
    for step in range(3):
        update(model, 0.02, step)
        publisher.publish(stream, step)
    cut(max(tmp_path.glob("weights-*")))
    said = publisher.publish(stream, 9)
    assert hash_of(read_version(tmp_path)[1]) == said and not list(tmp_path.glob("difference-*"))


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_after_a_file_was_lost_the_next_version_is_full(number: int, source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    stream, publisher = WeightStream(model), WeightVersions(tmp_path)
    for step in range(3):
        update(model, 0.02, step)
        publisher.publish(stream, step)
    first, newest = sorted(tmp_path.glob("weights-*"))
    [first, newest, *sorted(tmp_path.glob("difference-*"))][number].unlink()
    said = publisher.publish(stream, 9)
    assert hash_of(read_version(tmp_path)[1]) == said and not list(tmp_path.glob("difference-*"))


@pytest.mark.parametrize("text", ["{", '{"chain": []}', '{"a": 1}'])
def test_a_damaged_index_is_named(text: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX} cannot be read.*Remove the folder"):
        read_version(tmp_path)
    with pytest.raises(CheckpointError, match=f"{INDEX} cannot be read.*Remove the folder"):
        WeightVersions(tmp_path).publish(WeightStream(automoe.from_hf(source)), 0)


def test_a_second_writer_is_refused(source: Path, tmp_path: Path) -> None:
    stream = WeightStream(automoe.from_hf(source))
    publisher = WeightVersions(tmp_path)
    handle = take_lock(tmp_path / LOCK)
    with pytest.raises(BlockingIOError):
        publisher.publish(stream, 0)
    os.close(handle)
    assert publisher.publish(stream, 0)


def test_a_reader_follows_files_that_are_replaced_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the index and at the files, a version is published that removes them."""
    model = automoe.from_hf(source)
    stream, publisher = WeightStream(model), WeightVersions(tmp_path)
    publisher.publish(stream, 0)
    number, tensors = read_version(tmp_path)
    for step in (1, 2):
        update(model, 0.02, step)
        publisher.publish(stream, step)
    read, said = versions._read, []

    def overtaken(*arguments: Any) -> Any:
        if not said:
            update(model, 1.0, 9)
            flip(max(tmp_path.glob("weights-*")), -1)  # the next version is then full
            said.append(publisher.publish(stream, 9))
        return read(*arguments)

    monkeypatch.setattr(versions, "_read", overtaken)
    number, tensors = read_version(tmp_path, tensors, number)
    assert number == 3 and [hash_of(tensors)] == said


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def killed_at(line: int, folder: Path, stream: WeightStream, step: int) -> bool:
    """Publish in a child that dies at the ``line``-th line of the module; whether it died."""
    child = os.fork()
    if child == 0:
        lines = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != versions.__file__:
                return None
            lines += event == "line"
            if lines > line:
                os._exit(9)
            return trace

        sys.settrace(trace)
        WeightVersions(folder).publish(stream, step)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("stride", [149, pytest.param(5, marks=pytest.mark.faults)])
def test_a_kill_anywhere_leaves_a_version(stride: int, source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    stream = WeightStream(model)
    before = WeightVersions(tmp_path).publish(stream, 0)
    deaths = 0
    for step in count(1):
        line = (step - 1) * stride
        update(model, 0.01, step)
        now = hash_of({name: one for bucket in stream for name, one in bucket.items()})
        died = killed_at(line, tmp_path, stream, step)
        deaths += died
        assert hash_of(read_version(tmp_path)[1]) in ((before, now) if died else (now,))
        before = WeightVersions(tmp_path).publish(stream, step)
        assert before == now == hash_of(read_version(tmp_path)[1])
        if not died:
            break
    assert deaths > 5
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".lock", ".safetensors", ".zip"}
    assert (tmp_path / INDEX).is_file()


def test_files_of_others_in_the_folder_stay(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    published, model = WeightVersions(tmp_path), automoe.from_hf(source)
    for step in range(2):
        update(model, 0.02, step)
        published.publish(WeightStream(model), step)
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "folder").is_dir()
