"""A resumed run is the run that was never interrupted: bit for bit on its mesh, at 1e-10 on any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_runs import Run, Tensors, config, on_mesh, run

from automoe.testing.pool import RankPool

PP2_DP2_EP2 = dict(pp=2, dp_shard=2, ep=2)
TOLERANCE = 1e-10


def assert_equal_bits(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def assert_close(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        # The bias moves by signs: a relative error of one part in 1e10 has nothing to be relative to.
        assert (got[name] - tensor).norm() <= TOLERANCE * max(tensor.norm(), 1e-6), name


def assert_everything_moved(before: Run, step: int) -> None:
    """State that is still at its first values would be restored by not saving it at all."""
    start, later = before.states[0], before.states[step]
    assert {"model", "optimizer"} == {name.split(".")[0] for name in later}
    assert any(name.endswith("expert_bias") for name in later)
    assert any(name.endswith("load_fractions") for name in later)
    assert [name for name in later if torch.equal(start[name], later[name])] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_mesh_to_the_bit(ranks: RankPool, text: Path, tmp_path: Path, dtype: str) -> None:
    settings = config(text, dtype, **PP2_DP2_EP2)
    straight = run(ranks, settings, tmp_path / "run", until=6, save_at=[3])
    assert_everything_moved(straight, 3)
    resumed = run(ranks, settings, tmp_path / "run", until=6)
    assert (straight.resumed_at, resumed.resumed_at) == (None, 3)
    assert_equal_bits(resumed.states[3], straight.states[3])
    assert resumed.losses == straight.losses[3:]
    assert_equal_bits(resumed.states[6], straight.states[6])
    assert resumed.counters == {step: straight.counters[step] for step in (3, 6)}
    assert straight.counters[6]["loader"]["consumed_rows"] == 48


def test_other_meshes(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """pp2 x dp2 x ep2 saves at step 3, dp4 x ep4 goes on to 6, one rank to 8: as one rank from the start."""
    settings = config(text, **PP2_DP2_EP2)
    one = on_mesh(settings)
    straight = run(ranks, one, tmp_path / "straight", until=8, save_at=[3, 6])

    first = run(ranks, settings, tmp_path / "run", until=3, save_at=[3])
    second = run(ranks, on_mesh(settings, dp_shard=4, ep=4), tmp_path / "run", until=6, save_at=[6])
    third = run(ranks, one, tmp_path / "run", until=8)

    assert (second.resumed_at, third.resumed_at) == (3, 6)
    assert_equal_bits(second.states[3], first.states[3])
    assert_equal_bits(third.states[6], second.states[6])
    for step, part in ((3, first), (6, second), (8, third)):
        assert_close(part.states[step], straight.states[step])
        assert part.counters[step] == straight.counters[step]
    losses = first.losses + second.losses + third.losses
    assert losses == pytest.approx(straight.losses, rel=TOLERANCE)


def test_sharded_experts_and_replicas(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """Experts cut by rows (ep_shard) and replicas (HSDP) are written once and come back whole."""
    settings = config(text, dp_replicate=2, dp_shard=2, ep=2)
    saved = run(ranks, settings, tmp_path / "run", until=1, save_at=[1])
    loaded = run(ranks, on_mesh(settings, dp_shard=2), tmp_path / "run", until=1)
    assert loaded.resumed_at == 1
    assert_equal_bits(loaded.states[1], saved.states[1])


def test_resume_never_starts_over_beside_what_is_there(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text)
    straight = run(ranks, settings, tmp_path / "run", until=2, save_at=[2])
    never = replace(settings, checkpoint=replace(settings.checkpoint, resume="never"))
    again = run(
        ranks, replace(never, train=replace(never.train, seed=1)), tmp_path / "run", until=2, save_at=[2]
    )
    assert again.resumed_at is None
    assert len(again.losses) == 2 and again.losses != straight.losses
    assert (tmp_path / "run" / "checkpoints.1" / "step-2").is_dir()
    resumed = run(ranks, replace(settings, train=replace(settings.train, seed=1)), tmp_path / "run", until=2)
    assert_equal_bits(resumed.states[2], again.states[2])


def test_another_dtype_is_said(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text, "float32", dp_shard=2)
    first = run(ranks, settings, tmp_path / "run", until=1, save_at=[1])
    same = run(ranks, settings, tmp_path / "run", until=1)
    assert (same.resumed_at, first.said, same.said) == (1, "", "")
    other = replace(settings, train=replace(settings.train, dtype="bfloat16"))
    resumed = run(ranks, other, tmp_path / "run", until=1)
    assert resumed.resumed_at == 1
    assert "trained with train.dtype=float32" in resumed.said and "train.dtype=bfloat16" in resumed.said
    assert resumed.said.count("warning") == 1
