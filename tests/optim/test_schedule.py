"""Learning-rate schedules at the steps where they turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automoe.config.schema import OptimConfig
from automoe.optim.adamw import learning_rate


def curve(total: int, **options: object) -> list[float]:
    optim = OptimConfig(**{"lr": 1.0, "warmup_steps": 4, "decay_steps": 4, "min_lr_ratio": 0.2, **options})  # type: ignore[arg-type]
    return [learning_rate(optim, step, total) for step in range(total)]


def test_constant_climbs_and_stays() -> None:
    assert curve(7, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_cosine_starts_at_the_peak_and_its_last_step_takes_the_minimum() -> None:
    rates = curve(12, schedule="cosine")  # peak at step 3, end at step 11, half way at step 7
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.6)
    assert rates[5] == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
    assert rates[11] == pytest.approx(0.2)


def test_wsd_is_flat_until_its_last_steps() -> None:
    assert curve(12, schedule="wsd") == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_wsd_decay_gives_way_to_the_warm_up() -> None:
    assert curve(6, schedule="wsd") == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.6, 0.2])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_takes_the_full_rate(schedule: str) -> None:
    assert curve(50, schedule=schedule, warmup_steps=0)[0] == 1.0


@given(
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup_steps=st.integers(0, 30),
    decay_steps=st.integers(0, 30),
    min_lr_ratio=st.floats(0, 1),
    total=st.integers(1, 40),
)
def test_every_step_has_a_rate_and_the_decay_never_climbs(
    schedule: str, warmup_steps: int, decay_steps: int, min_lr_ratio: float, total: int
) -> None:
    rates = curve(
        total, schedule=schedule, warmup_steps=warmup_steps, decay_steps=decay_steps, min_lr_ratio=min_lr_ratio
    )
    assert all(0 <= rate <= 1 for rate in rates)
    after = rates[warmup_steps:]
    assert all(later <= earlier + 1e-12 for earlier, later in zip(after, after[1:], strict=False))
    assert all(rate >= min_lr_ratio - 1e-12 for rate in after)
