"""Learning-rate schedules at the steps where they turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automoe.config.batch import rows_of_run
from automoe.config.schema import Config, OptimConfig
from automoe.config.train_schema import Phase
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.optim.schedule import bias_update_rate, learning_rate, mtp_loss_weight
from tests.support.configurations import quick_config


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


PHASES = [
    Phase(2),
    Phase(4, 0.5, "linear", mtp_loss_weight=0.1),
    Phase(2, 0.7, bias_update_rate=0.0),
    Phase(4, 0.1, "cosine"),
]


def test_each_phase_goes_from_the_one_before_to_its_own_rate() -> None:
    rates = curve(16, schedule="phases", phases=PHASES)
    assert rates[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates[6:12] == pytest.approx([0.875, 0.75, 0.625, 0.5, 0.7, 0.7])
    assert rates[12:] == pytest.approx([0.4 + 0.3 * 2**-0.5, 0.4, 0.4 - 0.3 * 2**-0.5, 0.1])


def test_biases_and_modules_have_the_rates_of_their_phase() -> None:
    config = Config(optim=OptimConfig(schedule="phases", warmup_steps=4, phases=PHASES))
    rates = [bias_update_rate(config, step) for step in (0, 3, 4, 9, 10, 11, 12, 15)]
    assert rates == [1e-3] * 4 + [0.0] * 2 + [1e-3] * 2
    assert [mtp_loss_weight(config, step) for step in (0, 3, 5, 6, 9, 10)] == [0.3] * 3 + [0.1] * 2 + [0.3]


@pytest.mark.parametrize(
    ("name", "experiment", "tokens", "rates"),
    [
        ("dsv3_671b", "dsv3_recipe", 14.8, {9.99: 2.2e-4, 10.1: 2.19736e-4, 14.301: 2.2e-5, 14.7: 7.3e-6}),
        ("kimi_k2_1t_a32b", "kimi_k2_recipe", 15.5, {9.99: 2e-4, 12.75: 1.1e-4, 15.4999: 2e-5}),
    ],
)
def test_a_recipe_has_the_rates_and_tokens_of_its_paper(
    name: str, experiment: str, tokens: float, rates: dict[float, float]
) -> None:
    config = quick_config(name, [f"experiment={experiment}"])
    train, optim = config.train, config.optim
    full = train.global_batch_size * train.seq_len / 1e12

    def step_at(seen: float) -> int:  # behind the growing batches
        return int(train.steps - (tokens - seen) / full)

    for seen, rate in rates.items():
        assert learning_rate(optim, step_at(seen), train.steps) == pytest.approx(rate, rel=1e-4)
    assert rows_of_run(train) * train.seq_len / 1e12 == pytest.approx(tokens, rel=1e-5)
    validate(config, 1024, "cuda")
    if experiment == "dsv3_recipe":
        assert [bias_update_rate(config, step_at(seen)) for seen in (14.29, 14.31)] == [1e-3, 0]
        weights = [mtp_loss_weight(config, step_at(seen)) for seen in (1, 9.999, 10.001, 14.29, 14.31, 14.799)]
        assert weights == [0.3] * 2 + [0.1] * 4 and config.model.num_mtp_layers == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.schedule=phases"], "no phases follow the warm-up (optim.schedule=phases)"),
        (["optim.phases=[{steps: 180}]"], "it is cosine"),
        (["optim.schedule=phases", "optim.phases=[{steps: 9}, {steps: 1}]"], "Set train.steps=30"),
        (["optim.schedule=phases", "optim.phases=[{steps: 281}, {steps: -1}]"], "phase 2 is {steps: -1"),
        (["optim.schedule=phases", "optim.phases=[{steps: 280, lr_ratio: -1}]"], "lr_ratio: -1"),
        (["optim.schedule=phases", "optim.phases=[{steps: 280, mtp_loss_weight: 0.1}]"], "Set model.num_mtp_layers=1"),
        (["optim.schedule=phases", "optim.phases=[{steps: 180, decay: cubic}]"], "cubic"),
        (["optim.schedule=phases", "optim.phases=[{step: 180}]"], "step"),
    ],
)
def test_phases_that_do_not_fill_the_run_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(quick_config(overrides=overrides), 4)
    assert said in str(error.value)
