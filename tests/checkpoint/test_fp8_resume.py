"""What delayed scales remember of the steps before is part of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_runs import config, on_mesh, run, run_ranks

from automoe.config.schema import Config
from automoe.verify.pool import RankPool


def delayed(text: Path, **mesh: int) -> Config:
    settings = config(text, "float32", **mesh)
    return replace(settings, train=replace(settings.train, fp8="delayed"))


def histories(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.endswith(".scaling.history")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(dict(dp_shard=2, ep=2), id="dp2 x ep2"),
        pytest.param(dict(pp=2, dp_shard=2, ep=2), id="pp2 x dp2 x ep2"),
    ],
)
def test_a_resumed_run_has_the_same_scales_to_the_bit(
    ranks: RankPool, text: Path, tmp_path: Path, mesh: dict[str, int]
) -> None:
    settings = delayed(text, **mesh)
    everyone = run_ranks(ranks, settings, tmp_path / "run", until=4, save_at=[2])
    resumed = run(ranks, settings, tmp_path / "run", until=4)
    assert resumed.resumed_at == 2 and resumed.losses == everyone[0].losses[2:]
    for step in (2, 4):
        # The two ranks of a stage have seen the same.
        held = [histories(each.states[step]) for each in everyone]
        for first, second in zip(held[::2], held[1::2], strict=True):
            assert first and first.keys() == second.keys()
            assert all(torch.equal(second[name], history) for name, history in first.items())
        straight = {name: t for each in everyone for name, t in each.states[step].items()}
        assert straight.keys() == resumed.states[step].keys()
        for name, tensor in straight.items():
            assert torch.equal(resumed.states[step][name], tensor), name
        for name, history in histories(straight).items():
            assert (history[:, :step] > 0).all() and not history[:, step:].any(), name


@pytest.mark.exhaustive
def test_on_another_mesh_too(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    saved = run(ranks, delayed(text, dp_shard=2, ep=2), tmp_path / "run", until=2, save_at=[2])
    loaded = run(ranks, on_mesh(delayed(text), dp_shard=1), tmp_path / "run", until=2)
    assert histories(saved.states[2]).keys() == histories(loaded.states[2]).keys() != set()
    for name, history in histories(saved.states[2]).items():
        assert torch.equal(loaded.states[2][name], history), name


@pytest.mark.exhaustive
def test_a_run_may_change_to_delayed_scales_and_back(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """A checkpoint without a history starts one; a run that has no use for it leaves it."""
    to, plain = delayed(text), config(text, "float32")
    run(ranks, plain, tmp_path / "run", until=1, save_at=[1])
    there = run(ranks, to, tmp_path / "run", until=2, save_at=[2])
    assert there.resumed_at == 1 and "was trained with train.fp8=off" in there.said
    assert all((history[:, 1:] == 0).all() for history in histories(there.states[2]).values())
    back = run(ranks, plain, tmp_path / "run", until=3)
    assert back.resumed_at == 2 and not histories(back.states[2])
