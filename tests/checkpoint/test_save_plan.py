"""The plan of a save is made once, and anew after it failed."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import build_state, config, open_store
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from automoe.checkpoint.saved_state import tensors_of
from automoe.comm.local_shard import local_shard
from automoe.config.schema import Config
from automoe.verify.pool import RankPool


def plans_of_saves(settings: Config, run_dir: Path) -> tuple[list[int], list[int], bool]:
    """Plans that this rank had made after each of five saves, the third of which fails; tensors that it sent for each
    save; and whether the last save has what the state was."""
    state, _, _ = build_state(settings, run_dir)
    store, made, sent = open_store(settings, run_dir), 0, []

    def count(plans: list[default_planner.SavePlan], *args: bool) -> object:
        nonlocal made
        made += 1
        return plan(plans, *args)

    def prepare(writer: FileSystemWriter, plan: default_planner.SavePlan) -> default_planner.SavePlan:
        sent.append(len(plan.items))
        if state.step == 3 and dist.get_rank() == 1:
            raise RuntimeError("a rank that cannot plan")
        return prepared(writer, plan)

    plan, prepared, counts = default_planner.create_default_global_save_plan, FileSystemWriter.prepare_local_plan, []
    with (
        mock.patch.object(default_planner, "create_default_global_save_plan", count),
        mock.patch.object(FileSystemWriter, "prepare_local_plan", prepare),
    ):
        for state.step in range(1, 6):
            with torch.no_grad():
                for tensor in tensors_of(state).values():
                    local_shard(tensor).add_(1)
            try:
                store.save(state)
            except RuntimeError as error:
                assert state.step == 3 and "a rank that cannot plan" in str(error)
            counts.append(made)
    saved = {name: local_shard(tensor).clone() for name, tensor in tensors_of(state).items()}
    for tensor in tensors_of(state).values():
        local_shard(tensor).detach().zero_()
    store.load_latest(state)
    return counts, sent, all(torch.equal(local_shard(t), saved[name]) for name, t in tensors_of(state).items())


@pytest.mark.exhaustive
def test_ranks_send_their_plans_once_and_again_after_a_failure(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    outcomes = ranks.run(plans_of_saves, 2, config(text, dp_shard=2, ep=2), tmp_path / "run")
    assert [counts for counts, _, _ in outcomes] == [[1, 1, 1, 2, 2], [0] * 5]
    for _, sent, restored in outcomes:
        assert sent[0] == sent[3] > 0 and sent[1] == sent[2] == sent[4] == 0
        assert restored
