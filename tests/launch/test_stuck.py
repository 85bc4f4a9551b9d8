"""A rank that stays away from a collective is named, and so are the collective and where everybody is."""

from __future__ import annotations

import io
import json
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from launch_command import RECIPES, TWO_RANKS, Command

from automoe.launch.run_dir import ERROR_FILE, STUCK_FILE, read_status
from automoe.launch.stuck import Pending, Standing, StuckWatch, _working_thread, describe_place, who_is_missing
from automoe.parallel.overlap import BACKWARD_THREAD, MergedPasses
from automoe.parallel.pipeline import wait_for_ranks
from tests.support.command import MESHES, TINY, TrainCommand

DISPATCH = Pending("all_to_all", 7, "ep", [0, 1, 2], 30.0, 30.0)
SUM = Pending("all_reduce", 3, "world", [0, 1, 2, 3], 29.0, 30.0)


def standing(rank: int, *pending: Pending, communicates: bool = False) -> Standing:
    return Standing(rank, f"file.py:{rank} in f", communicates, list(pending))


def test_the_rank_outside_of_every_collective_is_to_blame() -> None:
    standings = {0: standing(0, DISPATCH), 1: standing(1, DISPATCH), 2: standing(2), 3: standing(3, SUM)}
    rank, message = who_is_missing(standings, 4, 0, 30.0)
    assert rank == 2
    assert message == (
        "rank 2 did not join all_to_all 7 of group ep (ranks 0, 1, 2) in 30 s: it is at file.py:2 in f. "
        "In it: ranks 0, 1, at file.py:0 in f. In all_reduce 3 of group world "
        "(ranks 0, 1, 2, 3): rank 3, at file.py:3 in f."
    )


def test_a_rank_beyond_the_group_can_be_what_everybody_waits_for_in_the_end() -> None:
    standings = {0: standing(0, DISPATCH), 1: standing(1, DISPATCH), 2: standing(2, SUM), 3: standing(3)}
    rank, message = who_is_missing(standings, 4, 0, 30.0)
    assert rank == 3
    assert "rank 3 did not get to the point where others wait for it, in all_to_all 7" in message


def test_a_rank_that_does_not_answer_is_named_before_one_that_does() -> None:
    standings = {0: standing(0, DISPATCH), 1: standing(1), 3: standing(3)}
    rank, message = who_is_missing(standings, 4, 0, 30.0)
    assert rank == 1 and "Neither did rank 2: it does not answer at all. Neither did rank 3: it is at" in message
    rank, message = who_is_missing({0: standings[0], 1: standing(1, DISPATCH)}, 3, 0, 30.0)
    assert rank == 2 and "it does not answer at all" in message


def test_ranks_that_wait_for_one_another() -> None:
    standings = {0: standing(0, DISPATCH), 1: standing(1, SUM), 2: standing(2, communicates=True)}
    rank, message = who_is_missing(standings, 3, 0, 30.0)
    assert rank == 0 and "they wait for one another" in message
    assert "(ranks 0, 1, 2, 3): rank 1, at" in message and "In a send or receive: rank 2, at" in message


def test_a_save_in_the_background_and_the_training_beside_it_are_told_apart() -> None:
    """The main threads of both ranks come and go in collectives of their own while rank 1's save does not get on."""
    gather = Pending("gather", 5, "checkpoint", [0, 1], 40.0, 1800.0)
    waits = replace(standing(0, gather, DISPATCH), saving="store.py:9 in save")
    stalls = replace(standing(1, DISPATCH), saving="files.py:7 in write")
    both = {0: waits.of_thread(saves=True), 1: stalls.of_thread(saves=True)}
    rank, message = who_is_missing(both, 2, 0, 40.0)
    assert rank == 1 and "rank 1 did not join gather 5 of group checkpoint (ranks 0, 1) in 40 s" in message
    assert "it is at files.py:7 in write. In it: rank 0, at store.py:9 in save" in message
    beside = {0: waits.of_thread(saves=False), 1: replace(stalls, pending=[gather]).of_thread(saves=False)}
    rank, message = who_is_missing(beside, 2, 0, 30.0)
    assert rank == 1 and "rank 1 did not join all_to_all 7" in message and "it is at file.py:1 in f" in message


def test_a_saving_thread_that_waits_for_work_is_not_where_a_save_stands(tmp_path: Path) -> None:
    """The main thread saves at the end of a run whose other saves were in the background."""
    (tmp_path / "logs").mkdir()
    watch = StuckWatch(tmp_path, 0, 1, io.StringIO())
    watch._ask()
    with ThreadPoolExecutor(1, thread_name_prefix="save_") as saves:
        saves.submit(int).result()
        watch._say_where()
    [found] = watch._standings(watch._asked()).values()
    assert found.saving is None and found.of_thread(saves=True).place == found.place


def test_a_rank_whose_own_collective_had_no_more_time_did_join_it(tmp_path: Path) -> None:
    """Its main thread waits for the one that asks around; what it says is where it was before."""

    def receive() -> None:
        raise RuntimeError("Timed out waiting 30000ms for recv operation to complete")

    asking, other = (StuckWatch(tmp_path, rank, 2, io.StringIO()) for rank in (0, 1))
    asking.timeout_s = other.timeout_s = 30.0
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            receive()
        errors.append(caught.value)
    (tmp_path / "logs").mkdir()
    asks = threading.Thread(target=asking.explain, args=(errors[0],))
    asks.start()
    while not (tmp_path / STUCK_FILE).exists():
        time.sleep(0.01)
    leaves = threading.Thread(target=other.explain, args=(errors[1],))
    leaves.start()
    while not (tmp_path / "logs" / "rank1.stuck.json").exists():
        other.look()  # as the thread that watches does
    asks.join()
    leaves.join()
    message = json.loads((tmp_path / ERROR_FILE).read_text())["message"]
    assert "no rank is outside of a collective: they wait for one another, or for a link that is gone" in message
    assert "did not join" not in message and message.count("in receive") == 1 and "In it: ranks 0, 1, at" in message


def test_a_collective_that_the_recorder_has_dropped_is_still_named(tmp_path: Path) -> None:
    """Within some seconds of time no look sees it nearly out of that, and the failure comes before the next."""
    watch = StuckWatch(tmp_path, 0, 1, io.StringIO())
    watch._lately = [replace(DISPATCH, seconds=4.0, timeout_s=5.0), replace(SUM, seconds=0.5, timeout_s=5.0)]
    watch.timeout_s = 5.0
    watch.explain(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
    message = json.loads((tmp_path / ERROR_FILE).read_text())["message"]
    assert message.startswith("all_to_all 7 of group ep (ranks 0, 1, 2) did not end in 5 s") and "world" not in message


def test_the_place_is_the_projects_own_line_with_the_module_around_it() -> None:
    frames = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe()
            while frame is not None:
                frames.insert(0, frame)
                frame = frame.f_back  # type: ignore[assignment]
            return x

    torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(Layer()))(torch.ones(1))
    place, communicates = describe_place(frames)
    assert place.startswith("1.0: ") and place.endswith("in forward") and "test_stuck.py:" in place
    assert not communicates


def test_a_rank_that_waits_for_a_receive_of_its_pipeline_communicates() -> None:
    """It was said to have stayed away: between this project's line and the wait itself no function of torch is seen."""
    seen = []

    class Work:
        def wait(self, timeout: timedelta) -> None:
            frame = sys._getframe(1)
            seen.append(describe_place([frame]))

    wait_for_ranks([Work()], timedelta(seconds=1))  # type: ignore[list-item]
    ((place, communicates),) = seen
    assert communicates and place.startswith("automoe/parallel/pipeline.py:") and place.endswith("in wait_for_ranks")


@pytest.mark.faults
@pytest.mark.parametrize(("seed", "what"), [(0, "all_to_all 4 of group world (ranks 0, 1)"), (1, "a send or receive")])
def test_a_rank_that_sleeps_is_named(command: Command, seed: int, what: str) -> None:
    code, _, err = command.run(
        "recipe_stays_away", *TWO_RANKS, "launch.timeout_s=30", "launch.init_timeout_s=30", f"train.seed={seed}"
    )
    assert code == 1
    assert f"error: rank 1: LaunchError: rank 1 did not join {what} in" in err
    lines = (RECIPES / "recipe_stays_away.py").read_text().splitlines()
    line = lines.index("            time.sleep(3600)") + 1
    assert f"it is at 3: {RECIPES}/recipe_stays_away.py:{line} in forward. In it: rank 0, at 3: " in err
    assert "launch.timeout_s" in err and "logs/rank*.stuck.json" in err and "logs/flight_*" in err
    records = [pickle.loads((command.run_dir / "logs" / f"flight_{rank}").read_bytes()) for rank in (0, 1)]
    ended = [any(entry["retired"] for entry in record["entries"]) for record in records]
    assert all(ended) or what == "a send or receive"  # which gloo does not record
    assert read_status(command.run_dir)["error"]["rank"] == 1
    assert command.pids() == []


@pytest.mark.faults
def test_a_stall_in_a_save_in_the_background_is_named_while_training_goes_on(tmp_path: Path) -> None:
    overrides = (*TINY, *MESHES["cp2-ep2"], "train.steps=3", "checkpoint.every=1", "checkpoint.async_save=true")
    command = TrainCommand(tmp_path / "run", (*overrides, "launch.timeout_s=12"))
    code, out, err = command.run(fault="sleep:rank=1:at=shard_written:step=1:seconds=16")
    assert code == 0, err
    assert (
        err.count("warning: rank 1 did not join") == 1 and "of group checkpoint (ranks 0, 1) in 11 s: it is at" in err
    )
    assert "fault_points.py:" in err and "In it: rank 0, at automoe/checkpoint/store.py:" in err


@pytest.mark.faults
def test_a_stall_in_a_save_is_named_and_the_run_goes_on_although_the_clock_jumps(command: Command) -> None:
    code, _, err = command.run("recipe_waits", *TWO_RANKS, "launch.timeout_s=12")
    assert code == 0, err
    assert err.count("warning: rank 1 did not join") == 1
    assert "of group checkpoint (ranks 0, 1) in 11 s: it is at" in err and "recipe_waits.py:" in err
    assert "It may take up to 1800 s" in err
    assert read_status(command.run_dir)["objective"] == 1.0


def test_a_merged_pass_that_works_tells_where_the_rank_is() -> None:
    """While the main thread waits for its turn, the rank is where the other pass is."""
    found = []
    MergedPasses().run(lambda: found.append(_working_thread().name), lambda: found.append(_working_thread().name))
    assert found == [BACKWARD_THREAD, threading.main_thread().name]
