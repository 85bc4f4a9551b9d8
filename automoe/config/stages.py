"""Which layers a pipeline stage holds, and which rank holds the stage. No torch.

The plan, validation and the pipeline itself split by these functions, so they cannot disagree.
"""

from __future__ import annotations

from automoe.errors import ConfigError


def split_layers(num_layers: int, num_stages: int, layers_per_stage: list[int] | None = None) -> list[range]:
    """Consecutive layers of every pipeline stage, first stage first.

    Args:
        num_layers: decoder layers in the whole model.
        num_stages: pp x stages_per_rank.
        layers_per_stage: explicit sizes; None splits as evenly as it goes, the longer stages first,
            because the last stage also holds the final norm and the head.

    Raises:
        ConfigError: fewer layers than stages, a stage without a layer, a wrong count or a wrong sum.
    """
    if layers_per_stage is None:
        if num_layers < num_stages:
            raise ConfigError(
                "model.num_layers",
                num_layers,
                f"every pipeline stage holds at least 1 layer, and there are {num_stages} stages "
                "(mesh.pp * parallel.stages_per_rank)",
                f"Set model.num_layers to {num_stages} or more, or lower mesh.pp or parallel.stages_per_rank",
            )
        each, longer = divmod(num_layers, num_stages)
        sizes = [each + (stage < longer) for stage in range(num_stages)]
    else:
        sizes = list(layers_per_stage)
        _check_sizes(num_layers, num_stages, sizes)
    stages, start = [], 0
    for size in sizes:
        stages.append(range(start, start + size))
        start += size
    return stages


def _check_sizes(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    even = [len(stage) for stage in split_layers(num_layers, num_stages)]
    remedy = f"Set parallel.layers_per_stage=[{','.join(map(str, even))}] or null"
    if len(sizes) != num_stages:
        rule = f"one size per stage: mesh.pp * parallel.stages_per_rank = {num_stages} stages, {len(sizes)} sizes"
    elif min(sizes) < 1:
        rule = f"every pipeline stage holds at least 1 layer, and stage {sizes.index(min(sizes))} has {min(sizes)}"
    elif sum(sizes) != num_layers:
        rule = f"the sizes add up to {sum(sizes)}, and model.num_layers is {num_layers}"
    else:
        return
    raise ConfigError("parallel.layers_per_stage", sizes, rule, remedy)


def stage_of_rank(schedule: str, pp: int, stages_per_rank: int) -> list[list[int]]:
    """Stages of every pp rank, in order: stage i lives on pp rank ``i % pp`` for every schedule.

    Raises:
        ConfigError: several stages a rank with a schedule that knows one only.
    """
    if stages_per_rank < 1:
        raise ConfigError(
            "parallel.stages_per_rank",
            stages_per_rank,
            "a rank holds at least 1 stage",
            "Set parallel.stages_per_rank=1 or more",
        )
    if stages_per_rank > 1 and schedule != "Interleaved1F1B":
        raise ConfigError(
            "parallel.stages_per_rank",
            stages_per_rank,
            f"schedule {schedule} runs exactly 1 stage a rank; only Interleaved1F1B runs several",
            "Set parallel.stages_per_rank=1 or parallel.schedule=Interleaved1F1B",
        )
    return [[rank + pp * turn for turn in range(stages_per_rank)] for rank in range(pp)]
