"""Which layers a pipeline stage holds, and which rank holds the stage. No torch.

The plan, validation and the pipeline itself split by these functions, so they cannot disagree.
"""

from __future__ import annotations

from itertools import accumulate


def split_layers(num_layers: int, num_stages: int, layers_per_stage: list[int] | None = None) -> list[range]:
    """Consecutive layers of every pipeline stage, first stage first.

    Args:
        num_layers: decoder layers in the whole model.
        num_stages: pp x stages_per_rank.
        layers_per_stage: explicit sizes; None splits as evenly as it goes, the longer stages first,
            because the last stage also holds the final norm and the head.

    The rules of a split are in ``automoe.config.validate``.
    """
    if layers_per_stage is None:
        each, longer = divmod(num_layers, num_stages)
        layers_per_stage = [each + (stage < longer) for stage in range(num_stages)]
    ends = list(accumulate(layers_per_stage))
    return [range(end - size, end) for end, size in zip(ends, layers_per_stage, strict=True)]


def stage_of_rank(pp: int, stages_per_rank: int) -> list[list[int]]:
    """Stages of every pp rank, in order: stage i lives on pp rank ``i % pp`` for every schedule."""
    return [[rank + pp * turn for turn in range(stages_per_rank)] for rank in range(pp)]
