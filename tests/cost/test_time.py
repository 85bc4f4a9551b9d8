"""The predicted time of a step: parts that add up, collectives by placement, schedules against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automoe.config.compose import compose_config, list_options
from automoe.config.validate import validate
from automoe.cost.time import StepTime, step_time


def time_of(name: str, *overrides: str) -> StepTime:
    config = compose_config(name, list(overrides))
    return step_time(config, validate(config, config.launch.num_ranks))


@pytest.mark.parametrize("name", list_options())
def test_every_primary_has_a_step_whose_parts_add_up(name: str) -> None:
    found = time_of(name)
    parts = [found.compute, found.bubble, found.other, *found.communication.values()]
    assert min(parts) >= 0 and found.seconds == pytest.approx(sum(parts))
    config = compose_config(name, [])
    tokens = config.train.global_batch_size * config.train.seq_len
    assert found.tokens_per_second == pytest.approx(tokens / found.seconds)
    assert found.calibrated == bool(config.cluster.gemm_curve)
    assert found.band[0] < found.tokens_per_second < found.band[1]
    assert (found.mfu is None) == (not config.cluster.peak_flops)
    if found.mfu is not None and found.mfu_full_attention is not None:
        assert 0 < found.mfu < found.mfu_full_attention < 1
    assert replace(found, bubble=found.bubble + 1).seconds == pytest.approx(found.seconds + 1)
