"""A world of 32 ranks, all axes larger than one: it starts, steps, saves, loses a rank to SIGKILL, and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from pretrain_runs import config, run_rank

from automoe.config.schema import Config
from automoe.observe.metrics import read_metrics
from automoe.passes.trace import listening
from automoe.verify.pool import RankError, RankPool
from tests.support.command import comparable

MESH = dict(pp=2, dp_shard=4, cp=2, tp=2, ep=4)
VICTIM = 17


@pytest.fixture(scope="module")
def many() -> Iterator[RankPool]:
    pool = RankPool(max_ranks=32)
    yield pool
    pool.close()


def run(settings: Config, kill_in: int) -> str:
    """What this rank printed; one of them is killed at the begin of step ``kill_in``."""

    def kill(name: str, step: int | None, edge: str) -> None:
        if (name, step, edge, dist.get_rank()) == ("step", kill_in, "begin", VICTIM):
            os.kill(os.getpid(), signal.SIGKILL)

    Path(settings.run_dir).mkdir(exist_ok=True)
    with listening(kill):
        outcome = run_rank(settings, "", (), False)
    assert not outcome.error
    return outcome.said


def settings_in(folder: Path) -> Config:
    folder.mkdir()
    settings = config(folder, steps=3, dtype="float64", rows=1, **MESH)
    settings.checkpoint.every = 1
    return settings


@pytest.mark.faults
def test_32_ranks_go_on_where_one_was_killed(many: RankPool, tmp_path: Path) -> None:
    straight, killed = settings_in(tmp_path / "straight"), settings_in(tmp_path / "killed")
    said = many.run(run, 32, straight, 0)
    assert "process groups open in" in said[0] and said[1:] == [""] * 31
    with pytest.raises(RankError) as error:
        many.run(run, 32, killed, 3)
    assert (error.value.rank, error.value.kind) == (VICTIM, "died")
    assert (Path(killed.run_dir) / "checkpoints" / "step-2").is_dir()
    many.run(run, 32, killed, 0)
    records = [[comparable(record) for record in read_metrics(one.run_dir)] for one in (straight, killed)]
    assert len(records[0]) == 3 and records[0] == records[1]
