"""Ranks that do not hold the same value all say so, and say which."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from automoe.errors import DataError
from automoe.run.services import same_on_all_ranks
from automoe.verify.pool import RankPool


def complaint(values: list[dict[str, object]]) -> str:
    """What this rank hears when rank r holds ``values[r]``; empty if nothing."""
    try:
        same_on_all_ranks(values[dist.get_rank()], "the corpus")
    except DataError as error:
        return str(error)
    return ""


def test_equal_values_pass(ranks: RankPool) -> None:
    # Insertion order is no difference.
    values = [{"content": "a1", "documents": 7}, {"documents": 7, "content": "a1"}]
    assert ranks.run(complaint, 2, values) == ["", ""]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("odd", [0, 2])
def test_one_rank_differs(ranks: RankPool, odd: int) -> None:
    values = [{"content": "b2" if rank == odd else "a1", "documents": 7} for rank in range(4)]
    heard = ranks.run(complaint, 4, values)
    assert len(set(heard)) == 1, "every rank leaves with the same error"
    assert heard[0].startswith("the corpus is not the same on all ranks: 1 of 4")
    assert f"rank {odd}." in heard[0]


def test_of_two_ranks_the_first_is_right(ranks: RankPool) -> None:
    heard = ranks.run(complaint, 2, [{"content": "a1"}, {"content": "b2"}])
    assert "rank 1." in heard[0] and heard[0] == heard[1]
