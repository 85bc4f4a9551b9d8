"""What a load reads and how much at once, counted where bytes come in."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch
from hf_mesh_cases import MESHES, empty_on_mesh, load_on_mesh, stored, world_size

import automoe
from automoe.comm.local_shard import local_shard
from automoe.hf import read
from automoe.hf.read import Reader, load_hf
from automoe.hf.shards import local_shards
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf


def load_counted(path: Path, mesh: str) -> tuple[int, int]:
    """Bytes that this rank asked the system for, and those of all ranks, as the load says."""
    parts, _, _ = empty_on_mesh(path, MESHES[mesh])
    asked, real_read = 0, os.preadv

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal asked
        count = real_read(handle, buffers, offset)
        asked += count
        return count

    os.preadv = preadv
    try:
        loaded = load_hf(parts, path)
    finally:
        os.preadv = real_read
    assert all(not torch.isnan(local_shard(p)).any() for part in parts.values() for p in part.parameters())
    return asked, loaded.bytes_read


def bytes_of(path: Path) -> int:
    return sum(tensor.nbytes for tensor in stored(path).values())


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_rank_reads_what_it_holds(fused: bool, tmp_path: Path, ranks: RankPool) -> None:
    """Where no rank has copies and rows stay whole, every byte is read once."""
    save_small_hf("qwen3_moe", tmp_path, save_original_format=not fused)
    results = ranks.run(load_counted, 4, tmp_path, "pp2_dp2_ep2")
    assert sum(asked for asked, _ in results) == bytes_of(tmp_path)
    assert {total for _, total in results} == {bytes_of(tmp_path)}
    # Nobody idles while another reads all.
    assert min(asked for asked, _ in results) > bytes_of(tmp_path) / 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("gap_bytes", [0, 8 << 10])
def test_copies_are_read_by_everyone_who_has_one(gap_bytes: int, tmp_path: Path, ranks: RankPool) -> None:
    """Columns of a matrix: alone, or in one go with the bytes between them."""
    save_small_hf("dsv3", tmp_path)
    results = ranks.run(load_with_gaps, 4, tmp_path, "tp2_dp2_ep2_etp2", gap_bytes)
    shards = sum(held for *_, held in results)
    asked = sum(asked for asked, *_ in results)
    assert bytes_of(tmp_path) < shards
    assert asked > 1.2 * shards if gap_bytes else asked == shards


def load_with_gaps(path: Path, mesh: str, gap_bytes: int) -> tuple[int, int, int]:
    """``load_counted``, and bytes of this rank's shards, where gaps below ``gap_bytes`` are read along."""
    before, read.GAP_BYTES = read.GAP_BYTES, gap_bytes
    try:
        counted = load_counted(path, mesh)
    finally:
        read.GAP_BYTES = before
    parts, _, _ = empty_on_mesh(path, MESHES[mesh])
    return *counted, sum(shard.local.nbytes for shard in local_shards(parts))


def test_a_tied_embedding_is_read_at_both_ends_of_a_pipeline(tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("qwen3_moe_tied", tmp_path)
    results = ranks.run(load_counted, 2, tmp_path, "pp2")
    embedding = stored(tmp_path)["model.embed_tokens.weight"].nbytes
    assert sum(asked for asked, _ in results) == bytes_of(tmp_path) + embedding


def local_shards_of(path: Path, mesh: str, chunk_bytes: int) -> dict[str, torch.Tensor]:
    read.CHUNK_BYTES = read.DIRECT_BYTES = chunk_bytes
    try:
        parts, _, _ = load_on_mesh(path, MESHES[mesh])
    finally:
        read.CHUNK_BYTES, read.DIRECT_BYTES = 2 << 20, 64 << 20
    return {name: local_shard(p) for part in parts.values() for name, p in part.named_parameters()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["one", "tp2_dp2_ep2_etp2"])
def test_large_tensors_are_read_in_pieces(mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("qwen3_moe", tmp_path)
    whole, pieces = (
        ranks.run(local_shards_of, world_size(MESHES[mesh]), tmp_path, mesh, size) for size in (1 << 30, 700)
    )
    for one, other in zip(whole, pieces, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


def test_chunks_bound_the_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small_hf("dsv3", tmp_path)
    model = automoe.from_hf(tmp_path, dtype=torch.float64)  # every number is converted, nothing goes straight
    sizes: list[int] = []
    real = Reader._read

    def measured(self: Reader, *given: Any) -> None:
        sizes.append(given[-1].nbytes)
        real(self, *given)

    monkeypatch.setattr(Reader, "_read", measured)
    monkeypatch.setattr(read, "CHUNK_BYTES", 512)
    load_hf(model, tmp_path)
    assert sum(sizes) == bytes_of(tmp_path)
    assert 0 < max(sizes) <= 512 < max(tensor.nbytes for tensor in stored(tmp_path).values())


def test_what_a_load_says_of_itself(tmp_path: Path) -> None:
    save_small_hf("dsv3", tmp_path)
    model = automoe.from_hf(tmp_path)
    loaded = load_hf(model, tmp_path, progress=True)  # not a terminal: no bar
    assert str(tmp_path) in str(loaded) and "GB/s" in str(loaded)
    assert loaded.bytes_read == bytes_of(tmp_path)


def test_a_terminal_sees_a_bar_and_a_log_sees_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_small_hf("dsv3", tmp_path / "checkpoint")
    model = automoe.from_hf(tmp_path / "checkpoint")
    capfd.readouterr()
    load_hf(model, tmp_path / "checkpoint", progress=True)
    assert capfd.readouterr() == ("", "")
    screen, real = io.StringIO(), rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda **_: real(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load_hf(model, tmp_path / "checkpoint", progress=True)
    shown = screen.getvalue()
    assert "reading checkpoint" in shown and "100%" in shown  # all bytes of the files arrived
    screen.truncate(0)
    load_hf(model, tmp_path / "checkpoint")
    assert screen.getvalue() == ""
