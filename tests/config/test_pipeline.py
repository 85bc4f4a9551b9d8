"""Orders of pipeline schedules against torch's own, where stages lie, and files that do not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from automoe.config.pipeline import IN_ROUNDS, NAMES, SINGLE, V_SHAPED, pipeline_order, rank_of_stage, stages_of_ranks
from automoe.errors import ConfigError

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def order_of_torch(
    name: str, pp: int, stages_per_rank: int, count: int
) -> list[list[tuple[tuple[str, int, int], ...]]]:
    kind = schedules.get_schedule_class(name)
    made: Any = object.__new__(kind)
    made.pp_group_size, made._n_microbatches, made.n_local_stages = pp, count, stages_per_rank
    made._num_stages = made.num_stages = pp * stages_per_rank
    made._stages = range(stages_per_rank)
    made.microbatches_per_round = count // max(1, count // pp)
    read = []
    for rank in range(pp):
        actions = [action for action in made._calculate_single_rank_operations(rank) if action is not None]
        pairs = [action.sub_actions or (action,) for action in actions]
        read.append(
            [tuple((KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in pair) for pair in pairs]
        )
    return read


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SINGLE])
def test_orders_are_those_of_torch(name: str) -> None:
    """Also where ``pp`` does not divide the micro-batches; what torch refuses is refused."""
    compared = 0
    for pp in (2, 3, 4, 8):
        for stages_per_rank in (2,) if name in V_SHAPED else (2, 3):
            for count in range(pp, 4 * pp + 2):
                rounds = count // pp
                if (name in IN_ROUNDS and count % rounds) or (name == "DualPipeV" and count < 2 * pp):
                    with pytest.raises(ConfigError, match=rf"parallel.schedule={name}.*{count}.*mesh\.pp"):
                        pipeline_order(name, pp, stages_per_rank, count, True)
                    continue
                mine = pipeline_order(name, pp, stages_per_rank, count, name == "DualPipeV")
                assert [list(entries) for entries in mine] == order_of_torch(name, pp, stages_per_rank, count)
                compared += 1
    assert compared > 30


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_action_runs_once_on_the_rank_of_its_stage(name: str, merged: bool) -> None:
    for pp in (1, 2, 4):
        per_rank = 1 if pp == 1 or name in SINGLE else 2
        seen: list[tuple[str, int, int]] = []
        for rank, entries in enumerate(pipeline_order(name, pp, per_rank, 8, merged)):
            mine = [action for entry in entries for action in entry]
            assert {rank_of_stage(stage, pp, name) for _, stage, _ in mine} == {rank}
            assert sorted({stage for _, stage, _ in mine}) == stages_of_ranks(pp, per_rank, name)[rank]
            seen += mine
        for stage in range(pp * per_rank):
            for index in range(8):
                kinds = sorted(kind for kind, *where in seen if where == [stage, index])
                assert kinds in (["B", "F"], ["F", "I", "W"]), (name, pp, stage, index)
        assert len(seen) == len(set(seen))


def test_stages_go_round_the_ranks_or_down_and_up_again() -> None:
    assert stages_of_ranks(4, 1, "1F1B") == [[0], [1], [2], [3]]
    assert stages_of_ranks(2, 3, "Interleaved1F1B") == [[0, 2, 4], [1, 3, 5]]
    for name in V_SHAPED:
        assert stages_of_ranks(3, 2, name) == [[0, 5], [1, 4], [2, 3]]


def written(path: Path, name: str, pp: int, count: int, merged: bool = False) -> Path:
    """A file as torch's ``_dump_csv`` writes it, with its empty fields."""
    rows = []
    for rank, entries in enumerate(pipeline_order(name, pp, 2, count, merged)):
        fields = [";".join(f"{stage}{kind}{index}" for kind, stage, index in entry) for entry in entries]
        rows.append([""] * rank + [f"({one})OVERLAP_F_B" if ";" in one else one for one in fields])
    path.write_text("\n".join(map(",".join, rows)) + "\n")
    return path


def test_a_file_is_the_order_that_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, merged in (("ZBVZeroBubble", False), ("DualPipeV", True), ("Interleaved1F1B", True)):
        path = str(written(tmp_path / f"{name}.csv", name, 2, 8, merged))
        assert pipeline_order(path, 2, 2, 8, merged) == pipeline_order(name, 2, 2, 8, merged)
        assert stages_of_ranks(2, 2, path) == stages_of_ranks(2, 2, name)
        theirs = [
            [schedules._Action.from_str(field) for field in row.split(",") if field]
            for row in Path(path).read_text().splitlines()
        ]
        assert [len(row) for row in theirs] == [len(entries) for entries in pipeline_order(name, 2, 2, 8, merged)]
    # a file that changes is read again
    written(tmp_path / "ZBVZeroBubble.csv", "DualPipeV", 2, 8)
    assert pipeline_order(str(tmp_path / "ZBVZeroBubble.csv"), 2, 2, 8) == pipeline_order("DualPipeV", 2, 2, 8)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pipeline_order("~/ZBVZeroBubble.csv", 2, 2, 8) == pipeline_order("DualPipeV", 2, 2, 8)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        (
            lambda text: text.replace("0F0,", "0F0,0SEND_F0,", 1),
            "'0SEND_F0' is not a computation.*adds sends.*compute_only",
        ),
        (lambda text: text.replace("0F0,", "0X0,", 1), "'0X0' is not a computation"),
        (lambda text: text.replace("1F1", "(0F1;1F1)OVERLAP_F_B", 1), "OVERLAP_F_B' is not a computation"),
        (
            lambda text: text.replace("0F0,", "", 1),
            "stage 0 does not have one F and one B.* of micro-batch 0.* 8 a step",
        ),
        (lambda text: text.replace("0F0,", "0F0,0F0,", 1), "an action twice"),
        (lambda text: text.replace("0F0,", "0F0,1F0,", 1), "stage 1 is in the rows of ranks 0 and 1"),
        (lambda text: text.split("\n")[0], "it has 1 rows, and mesh.pp=2"),
        (lambda text: text.replace("1W7", "1W8"), "stage 1 does not have one F"),
        (
            lambda text: text.replace("0F0,", "").replace("0F1,", "0F1,0F0,").replace("3F0", "0F0x", 1),
            "not a computation",
        ),
        (lambda text: _swapped(text, "3F0", "3I0"), "it deadlocks: rank 0 before .*'I', 3, 0.*rank 1"),
    ],
)
def test_a_file_that_cannot_run_is_refused(tmp_path: Path, change: Any, needle: str) -> None:
    path = written(tmp_path / "order.csv", "ZBVZeroBubble", 2, 8)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=needle):
        pipeline_order(str(path), 2, 2, 8)
        stages_of_ranks(2, 2, str(path))


def _swapped(text: str, one: str, other: str) -> str:
    return text.replace(f"{one},", "?,").replace(f"{other},", f"{one},").replace("?,", f"{other},")


def test_a_file_must_be_there_and_of_these_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read .No such file"):
        pipeline_order(str(tmp_path / "none.csv"), 2, 2, 8)
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "latin.csv").write_bytes(b"0F0,\xff")
    (tmp_path / "quote.csv").write_text('"' + "0F0," * 50_000)
    for name, said in (("fifo", "a FIFO"), ("latin", "utf-8"), ("quote", "field larger")):
        with pytest.raises(ConfigError, match=f"{name}.csv: it cannot be read.*{said}"):
            pipeline_order(str(tmp_path / f"{name}.csv"), 2, 2, 8)
    path = str(written(tmp_path / "order.csv", "ZBVZeroBubble", 2, 8))
    for stages_per_rank, count, needle in (
        (1, 8, "stages_per_rank=1"),
        (2, 6, "twice, or of a"),
        (2, 9, "micro-batch 8"),
    ):
        with pytest.raises(ConfigError, match=needle):
            pipeline_order(path, 2, stages_per_rank, count)
