"""Layer splits: complete, in order, even, and refused with the numbers when they cannot be."""

from __future__ import annotations

import pytest

from automoe.config.stages import split_layers, stage_of_rank
from automoe.errors import ConfigError


@pytest.mark.parametrize(("num_layers", "num_stages"), [(1, 1), (4, 2), (61, 16), (7, 3), (5, 5)])
def test_even_split_covers_every_layer_once_and_puts_longer_stages_first(num_layers: int, num_stages: int) -> None:
    stages = split_layers(num_layers, num_stages)
    sizes = [len(stage) for stage in stages]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert len(stages) == num_stages
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_given_sizes_are_kept() -> None:
    assert split_layers(6, 3, [1, 3, 2]) == [range(1), range(1, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes", "needle"),
    [
        (3, 4, None, "4 stages"),
        (6, 3, [3, 3], "3 stages, 2 sizes"),
        (6, 3, [3, 0, 3], "stage 1 has 0"),
        (6, 3, [1, 2, 2], "add up to 5"),
    ],
)
def test_impossible_split_names_the_numbers(
    num_layers: int, num_stages: int, sizes: list[int] | None, needle: str
) -> None:
    with pytest.raises(ConfigError, match=needle):
        split_layers(num_layers, num_stages, sizes)


def test_wrong_sizes_suggest_the_even_split() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.layers_per_stage=\[2,2,1\] or null"):
        split_layers(5, 3, [5])


def test_stages_go_round_the_ranks() -> None:
    assert stage_of_rank("1F1B", 4, 1) == [[0], [1], [2], [3]]
    assert stage_of_rank("Interleaved1F1B", 2, 3) == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ConfigError, match="only Interleaved1F1B"):
        stage_of_rank("1F1B", 2, 2)
    with pytest.raises(ConfigError, match="at least 1 stage"):
        stage_of_rank("1F1B", 2, 0)
