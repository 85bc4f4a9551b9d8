"""Orders of pipeline schedules against torch's own, and where stages lie."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from torch.distributed.pipelining import schedules

from automoe.config.pipeline import IN_ROUNDS, SINGLE, V_SHAPED, pipeline_order, rank_of_stage, stages_of_ranks
from automoe.config.schema import ParallelConfig
from automoe.errors import ConfigError

NAMES = get_args(get_type_hints(ParallelConfig)["schedule"])
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
