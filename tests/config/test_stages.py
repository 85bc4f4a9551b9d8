"""Layer splits: complete, in order, even, and refused with the numbers when they cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from automoe.config.mesh_shape import split_layers
from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import validate
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


def pipeline(num_layers: int, num_stages: int, sizes: list[int] | None = None) -> Config:
    config = Config(mesh=MeshConfig(pp=num_stages, dp_shard=1, ep_shard=1))
    config.model.num_layers, config.parallel.layers_per_stage = num_layers, sizes
    return config


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes", "needle"),
    [
        (3, 4, None, "4 stages"),
        (6, 3, [3, 3], "3 stages, 2 sizes"),
        (6, 3, [], "3 stages, 0 sizes"),
        (6, 3, [3, 0, 3], r"the stages of rank 1 are all empty"),
        (6, 3, [3, -1, 4], "a stage cannot have -1 layers"),
        (6, 3, [1, 2, 2], "add up to 5"),
    ],
)
def test_impossible_split_names_the_numbers(
    num_layers: int, num_stages: int, sizes: list[int] | None, needle: str
) -> None:
    with pytest.raises(ConfigError, match=needle):
        validate(pipeline(num_layers, num_stages, sizes), None)


def test_more_stages_than_layers_are_refused_where_they_are_split_too() -> None:
    refused: list[Callable[[], object]] = [lambda: validate(pipeline(61, 64), None), lambda: split_layers(61, 64)]
    for refuse in refused:
        with pytest.raises(ConfigError, match=r"model\.num_layers=61: .*there are 64 stages .* to 64 or more"):
            refuse()


def test_wrong_sizes_suggest_the_even_split() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.layers_per_stage=\[2,2,1\] or null"):
        validate(pipeline(5, 3, [5]), None)


@pytest.mark.parametrize(("stages", "needle"), [(2, "only Interleaved1F1B"), (0, "at least 1")])
def test_how_many_stages_a_rank_has_is_checked(stages: int, needle: str) -> None:
    config = pipeline(8, 2)
    config.parallel.stages_per_rank = stages
    with pytest.raises(ConfigError, match=f"parallel.stages_per_rank={stages}.*{needle}"):
        validate(config, None)
