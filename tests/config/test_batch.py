"""Rows of a step while ``train.rampup_batch_size`` lets the global batch grow."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from automoe.config.batch import rows_of_run, rows_of_step, steps_for
from automoe.config.schema import TrainConfig


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 90), st.integers(0, 300))
def test_a_batch_grows_as_in_megatron(start, increment, increments, more, consumed):
    over = increments + more
    train = TrainConfig(global_batch_size=start + increment * increments, rampup_batch_size=[start, increment, over])
    # Megatron-Core: consumed samples divided by those of an increment, rounded down
    steps = int(Fraction(consumed) / Fraction(over, increments))
    assert rows_of_step(train, consumed) == min(start + steps * increment, train.global_batch_size)
    rows = [0]
    for _ in range(9):
        rows.append(rows[-1] + rows_of_step(train, rows[-1]))
    assert rows_of_run(replace(train, steps=9)) == rows[-1]
    for most in (0.3, consumed, rows[5] - 0.5, rows[5], rows[9] + 1e-9):
        steps, taken = 0, 0
        while not steps or taken < most:
            steps, taken = steps + 1, taken + rows_of_step(train, taken)
        assert steps_for(train, most) == steps
    assert steps_for(train, 1e18) > 1e16, "of any number of epochs without a walk through its steps"
