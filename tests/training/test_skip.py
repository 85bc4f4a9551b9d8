"""Which losses are spikes."""

from __future__ import annotations

import math

import pytest

from automoe.config.schema import TrainConfig
from automoe.training.step import reason_to_skip, remember_loss, spike_threshold

TRAIN = TrainConfig(spike_factor=5.0, spike_window=5)
RECENT = [2.0, 2.1, 1.9, 2.2, 1.8]  # median 2, median absolute deviation 0.1


def test_the_threshold_is_five_robust_deviations_above_the_median() -> None:
    assert spike_threshold(RECENT, TRAIN) == pytest.approx(2.0 + 5 * 1.4826 * 0.1)
    assert reason_to_skip(2.74, 1.0, RECENT, TRAIN) is None
    why = reason_to_skip(2.75, 1.0, RECENT, TRAIN)
    assert why is not None and "2.7500 is a spike: above 2.7413" in why


def test_one_outlier_among_the_recent_ones_hides_no_spike() -> None:
    assert spike_threshold([*RECENT[:4], 1000.0], TRAIN) < 3


def test_too_few_losses_and_a_factor_of_zero_judge_nothing() -> None:
    assert spike_threshold(RECENT[:4], TRAIN) == math.inf
    assert reason_to_skip(1e9, 1.0, RECENT, TrainConfig()) is None


def test_losses_all_alike_leave_room() -> None:
    assert reason_to_skip(2.001, 1.0, [2.0] * 5, TRAIN) is None
    assert reason_to_skip(2.02, 1.0, [2.0] * 5, TRAIN) is not None


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
def test_what_is_not_finite_is_skipped_whatever_the_configuration(loss: float, norm: float) -> None:
    assert reason_to_skip(loss, norm, [], TrainConfig()) == f"loss {loss}, gradient norm {norm}"


def test_the_window_slides() -> None:
    recent: list[float] = []
    for loss in range(8):
        remember_loss(float(loss), recent, TRAIN)
    assert recent == [3.0, 4.0, 5.0, 6.0, 7.0]
