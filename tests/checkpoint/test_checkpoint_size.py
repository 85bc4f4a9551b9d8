"""The plan's size of a checkpoint against what ranks write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_runs import build_state, config, open_store

from automoe.config.compose import compose_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.planner import checkpoint as cost
from automoe.planner.checkpoint import checkpoint_cost, most_kept
from automoe.verify.pool import RankPool


def save(settings: Config, run_dir: Path) -> dict[str, int]:
    """Name and size of each file of a checkpoint of step 0."""
    state, _, _ = build_state(settings, run_dir)
    return {path.name: path.stat().st_size for path in open_store(settings, run_dir).save(state).iterdir()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh", [dict(pp=2, dp_shard=2, ep=2), dict(tp=2, ep=2), dict(dp_shard=1, dp_replicate=2, ep=2)], ids=str
)
def test_a_checkpoint_is_as_large_as_planned(
    ranks: RankPool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]
) -> None:
    settings = config(text, "float32", **mesh)
    settings = replace(settings, model=replace(settings.model, hidden_size=128, moe_intermediate_size=64))
    settings.optim.algorithm = "muon" if "tp" in mesh else "adamw"  # one moment per matrix, and no step count
    shape = resolve_mesh(settings.mesh, None)
    files = ranks.run(save, shape.world_size, settings, tmp_path / "run")[0]
    written = {name: size for name, size in files.items() if name.endswith(".distcp")}

    def wrong() -> list[str]:
        """Which figures are further off than they may be."""
        uneven = 0.25 if shape.dp_replicate > 1 else 0.05  # whole tensors are shared out among copies
        found = checkpoint_cost(settings, shape, 1.0)
        index = sum(files.values()) - sum(written.values())
        assert found.num_files == len(files)
        off = {
            "bytes": (found.bytes / sum(written.values()) - 1, 0.001),
            "rank": (found.rank_bytes / max(written.values()) - 1, uneven),
            "index": (found.metadata_bytes / index - 1, 0.03),
        }
        return [f"{name} {error:+.4f}" for name, (error, most) in off.items() if abs(error) > most]

    assert not wrong()
    for name in ("SHARD_BYTES", "SHARD_INDEX_BYTES", "TENSOR_INDEX_BYTES", "MANIFEST_BYTES"):
        with monkeypatch.context() as changed:
            changed.setattr(cost, name, 4 * getattr(cost, name))
            assert wrong(), name


def test_shards_of_a_large_model_are_those_that_torch_plans() -> None:
    """Torch planned DeepSeek-V3's on 1,024 ranks in a world without a GPU; the result names the commit of its script."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "checkpoint_plan.json"
    planned = json.loads(results.read_text())
    settings = compose_config("dsv3_671b", ["cluster=laptop"])
    found = checkpoint_cost(settings, resolve_mesh(settings.mesh, None), 1.0)
    assert (found.num_tensors, found.num_shards) == (planned["tensors"], planned["items_written"])
    assert found.num_files == planned["files"]
    # A pickled number takes 2, 3 or 5 bytes, by its size.
    assert found.metadata_bytes == pytest.approx(planned["index_bytes"], rel=0.04)
    # 671 B numbers with two moments, 4 bytes each.
    assert found.bytes == pytest.approx(12 * 671.03e9, rel=1e-3)


def test_seconds_are_those_of_the_slowest_way() -> None:
    settings = compose_config("dsv3_671b", [])
    shape = resolve_mesh(settings.mesh, None)

    def found(**cluster: float) -> cost.CheckpointCost:
        return checkpoint_cost(replace(settings, cluster=replace(settings.cluster, **cluster)), shape, 60.0)

    assumed = found()
    assert assumed.assumed and assumed.write_seconds == pytest.approx(assumed.bytes / 128 / 2e9)
    assert found(storage_bandwidth=1e9).write_seconds == pytest.approx(2 * assumed.write_seconds)
    assert found(storage_bandwidth=1e12).write_seconds == assumed.rank_bytes / cost.HASH_BANDWIDTH
    assert found(storage_limit=1e11).write_seconds == pytest.approx(assumed.bytes / 1e11)
    assert assumed.blocked_seconds == assumed.staged_bytes / 50e9 and assumed.interval_seconds == 1800
    assert assumed.disk_bytes == 3 * assumed.bytes
    waits = replace(settings, checkpoint=replace(settings.checkpoint, async_save=False))
    assert checkpoint_cost(waits, shape, 60.0).blocked_seconds == assumed.write_seconds


@pytest.mark.parametrize(
    ("kept", "most"),
    [
        ({}, 0),
        (dict(every=10, keep=3), 3),
        (dict(every=10, keep=3, keep_best=2), 5),
        (dict(every=10, keep=2, keep_every=25), 4),  # 50 and 100
        (dict(every=60, keep=3), 2),
        (dict(every_minutes=1.0, keep=3), 3),
    ],
    ids=str,
)
def test_how_many_are_kept(kept: dict, most: int) -> None:
    plain = Config()
    changed = replace(
        plain, train=replace(plain.train, steps=100), checkpoint=replace(plain.checkpoint, **{"every": 0} | kept)
    )
    assert most_kept(changed, changed.checkpoint.every or 1.0) == most
