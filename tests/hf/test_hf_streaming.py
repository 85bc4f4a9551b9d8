"""What a load reads, how often, and who reads it; counted where bytes come in."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path

import pytest
import rich.console
import torch
from hf_mesh_cases import MESHES, empty_on_mesh, load_on_mesh, stored, world_size

import automoe
from automoe.hf import progress, reader, transfer
from automoe.hf.reader import load_hf
from automoe.hf.strips import plan_units
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf


def load_counted(path: Path, mesh: str, machines: int = 1) -> tuple[int, int, int, int, int]:
    """Bytes that this rank asked the system for, and what the load says of itself."""
    parts, _, _ = empty_on_mesh(path, MESHES[mesh])
    asked, real_read, real_name = 0, os.preadv, reader._machine_name

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal asked
        count = real_read(handle, buffers, offset)
        asked += count
        return count

    os.preadv = preadv
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    reader._machine_name = lambda: f"machine {rank * machines // world}"
    try:
        loaded = load_hf(parts, path)
    finally:
        os.preadv, reader._machine_name = real_read, real_name
    whole = all(not torch.isnan(p.to_local()).any() for part in parts.values() for p in part.parameters())
    assert whole and loaded.counts.read == asked
    return asked, loaded.counts.owned, loaded.counts.received, loaded.bytes_read, loaded.bytes_owned


def bytes_of(path: Path) -> int:
    return sum(tensor.nbytes for tensor in stored(path).values())


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3_moe", "pp2_dp2_ep2"),
        pytest.param("dsv3", "hsdp2x2_ep2", marks=pytest.mark.exhaustive),
        ("dsv3", "tp2_dp2_ep2_etp2"),
    ],
)
def test_every_byte_is_read_once_on_a_machine(
    name: str, mesh: str, fused: bool, tmp_path: Path, ranks: RankPool
) -> None:
    save_small_hf(name, tmp_path, save_original_format=not fused)
    results = ranks.run(load_counted, world_size(MESHES[mesh]), tmp_path, mesh)
    assert sum(read for read, *_ in results) == bytes_of(tmp_path)
    for read, owned, received, all_read, all_owned in results:
        assert all_read == bytes_of(tmp_path) <= all_owned
        assert all_owned == sum(own for _, own, *_ in results)
        # Nobody idles while another reads all: a rank's share is its part of the bytes, to a factor of two.
        assert read > bytes_of(tmp_path) / len(results) / 2
        if mesh == "pp2_dp2_ep2":  # no copies anywhere
            assert read == owned and received == 0
        else:
            assert received > 0


def test_machines_do_not_share(tmp_path: Path, ranks: RankPool) -> None:
    """Replicas on two machines: each reads all of it once."""
    save_small_hf("dsv3", tmp_path)
    results = ranks.run(load_counted, 4, tmp_path, "hsdp2x2_ep2_ep_replicate2", machines=2)
    for machine in (results[:2], results[2:]):
        assert sum(read for read, *_ in machine) == bytes_of(tmp_path)


def test_a_tied_embedding_is_read_once_for_both_ends_of_a_pipeline(tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("qwen3_moe_tied", tmp_path)
    results = ranks.run(load_counted, 2, tmp_path, "pp2")
    assert sum(read for read, *_ in results) == bytes_of(tmp_path)
    embedding = stored(tmp_path)["model.embed_tokens.weight"].nbytes
    assert sum(own for _, own, *_ in results) == bytes_of(tmp_path) + embedding


def local_shards_of(path: Path, mesh: str, chunk_bytes: int) -> dict[str, torch.Tensor]:
    transfer.CHUNK_BYTES = transfer.DIRECT_BYTES = chunk_bytes
    try:
        parts, _, _ = load_on_mesh(path, MESHES[mesh])
    finally:
        transfer.CHUNK_BYTES, transfer.DIRECT_BYTES = 2 << 20, 64 << 20
    return {name: p.to_local() for part in parts.values() for name, p in part.named_parameters()}


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


def test_chunks_bound_the_scratch(tmp_path: Path) -> None:
    save_small_hf("dsv3", tmp_path)
    model = automoe.from_hf(tmp_path, dtype=torch.float64)  # every number is converted, nothing goes straight
    catalog = reader.open_catalog(tmp_path, model.config)
    largest = max(source.data.num_bytes for source in catalog.sources)
    before, transfer.CHUNK_BYTES = transfer.CHUNK_BYTES, 512
    try:
        counts = load_hf(model, tmp_path).counts
    finally:
        transfer.CHUNK_BYTES = before
    assert 0 < counts.largest_scratch <= 512 + 17 < largest


def test_who_reads_is_agreed_without_talking() -> None:
    """Random rectangles of random ranks: everyone's plan has the same readers, and covers what it needs."""
    import numpy as np

    random = np.random.default_rng(0)
    tables = []
    for _ in range(3):
        starts = random.integers(0, 20, (40, 2))
        sizes = random.integers(1, 12, (40, 2))
        bounds = np.stack((starts[:, 0], starts[:, 0] + sizes[:, 0], starts[:, 1], starts[:, 1] + sizes[:, 1]))
        tables.append(np.concatenate((random.integers(0, 4, (40, 2)), bounds.T), axis=1))

    class Named:  # plan_units asks a strip for no more than this
        def __init__(self, row: np.ndarray) -> None:
            self.read, self.number = self, int(row[0])
            self.matrix, self.rows, self.cols = (
                int(row[1]),
                tuple(map(int, row[2:4])),
                tuple(map(int, row[4:])),
            )

    ranks = [5, 7, 9]
    plans = [
        plan_units([Named(row) for row in table], tables, ranks, rank)  # type: ignore[misc]
        for rank, table in zip(ranks, tables, strict=True)
    ]
    seen: dict[tuple[int, int, tuple[int, int]], set[object]] = {}
    for rank, plan, table in zip(ranks, plans, tables, strict=True):
        assert [(u.number, u.matrix, u.rows) for u in plan] == sorted((u.number, u.matrix, u.rows) for u in plan)
        covered = 0
        for unit in plan:
            assert rank in unit.users and unit.reader in unit.users
            seen.setdefault((unit.number, unit.matrix, unit.rows), set()).add((unit.reader, unit.users, unit.cols))
            for strip in unit.strips:
                assert strip.rows[0] <= unit.rows[0] and unit.rows[1] <= strip.rows[1]
                assert unit.cols[0] <= strip.cols[0] and strip.cols[1] <= unit.cols[1]
                covered += unit.rows[1] - unit.rows[0]
        assert covered == sum(row[3] - row[2] for row in table)
    assert all(len(plans) == 1 for plans in seen.values())
    assert any(len(users) > 1 for plans in seen.values() for _, users, _ in plans)  # type: ignore[misc]
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, matrix, span in seen:
        rows.setdefault((number, matrix), []).append(span)
    for spans in rows.values():  # no row is read twice
        spans.sort()
        assert all(one[1] <= other[0] for one, other in zip(spans, spans[1:], strict=False))
    assert math.prod(map(len, plans)) > 0


def test_what_a_load_says_of_itself(tmp_path: Path) -> None:
    save_small_hf("dsv3", tmp_path)
    model = automoe.from_hf(tmp_path)
    loaded = load_hf(model, tmp_path, progress=True)  # not a terminal: no bar
    assert str(tmp_path) in str(loaded) and "GB/s" in str(loaded)
    assert loaded.bytes_read == loaded.bytes_owned == bytes_of(tmp_path)


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
    monkeypatch.setattr(progress, "STEP_S", 0.0)
    load_hf(model, tmp_path / "checkpoint", progress=True)
    shown = screen.getvalue()
    # The bytes of the files, all of them arrived; how fast depends on the machine.
    assert "reading checkpoint" in shown and "/s" in shown
    total = f"{bytes_of(tmp_path / 'checkpoint') / 1000:.1f}"
    assert f"{total}/{total} kB" in shown
    screen.truncate(0)
    load_hf(model, tmp_path / "checkpoint")
    assert screen.getvalue() == ""
