"""Pipeline layouts in Megatron-Core's notation."""

from __future__ import annotations

import pytest

from automoe.config.convert import config_from_dict, config_to_dict
from automoe.config.layout import parse_layout
from automoe.config.mesh_shape import resolve_mesh, stage_layers
from automoe.config.validate import validate
from automoe.errors import ConfigError
from tests.support.configurations import quick_config

TWO_RANKS = ["mesh.pp=2", "mesh.ep=1", "mesh.dp_shard=1", "parallel.schedule=Interleaved1F1B"]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*29|L", ["Ettt", *["tt"] * 29, "", "L"]),
        ("E|t*2|t|L", ["E", "tt", "t", "L"]),
        ("E,t*3 | (t|)*2, tL", ["Ettt", "t", "t", "tL"]),
        ("E|(t(t|)*2)*2L", ["E", "tt", "t", "tt", "t", "L"]),
        ("E(t*2)*3L", ["EttttttL"]),
        ("E|t*0|L", ["E", "", "L"]),
        ("Et|t|m*2L", ["Et", "t", "mmL"]),
        ("Et*3|(tt|)*29m|L", ["Ettt", *["tt"] * 29, "m", "L"]),  # the example of Megatron-Core's documentation
        ("Etm|m||L", ["Etm", "m", "", "L"]),
    ],
)
def test_stages_are_written_out(text: str, stages: list[str]) -> None:
    assert parse_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "one L; this is"),
        ("t|tL", "this is ttL"),
        ("tE|tL", "this is tEtL"),
        ("EtL|t", "this is EtLt"),
        ("Em|tL", "this is EmtL"),
        ("Etm|tm|L", "this is EtmtmL"),
        ("Et|tL|m", "this is EttLm"),
        ("Et|tm|t", "this is Ettmt"),
        ("Et|(ttL", r"has no \)"),
        ("Et)|tL", r"'\)' has no meaning"),
        ("E*t|L", r"'\*' has no meaning"),
        ("*3EtL", r"'\*3' has no meaning"),
        ("Et*-1L", r"'\*' has no meaning"),
        ("Et*²L", r"'²' has no meaning|'\*' has no meaning"),
        ("Ex|L", "'x' has no meaning"),
        ("E((((t*999)*999)*999)*999)L", "at most 20000 letters"),
        ("Et*99999999999999999999L", "at most 20000 letters"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.layout.*({says})"):
        parse_layout(text)


def test_a_layout_sets_the_stages_and_survives_the_frozen_file() -> None:
    config = quick_config(overrides=[*TWO_RANKS, "parallel.layout='E|(t|)*2ttL'"])
    assert (config.parallel.stages_per_rank, config.parallel.layers_per_stage) == (2, [0, 1, 1, 2])
    mesh = resolve_mesh(config.mesh, None)
    assert stage_layers(config, mesh) == [range(0), range(1), range(1, 2), range(2, 4)]
    assert config_from_dict(config_to_dict(config)) == config
    assert validate(config, None) == mesh


def test_a_rank_may_hold_the_head_alone() -> None:
    config = quick_config(overrides=[*TWO_RANKS, "parallel.layout='Et||ttt|L'"])
    assert config.parallel.layers_per_stage == [1, 0, 3, 0]
    validate(config, None)


def test_modules_are_where_the_layout_has_them() -> None:
    modules = ["model=small_dsv3", "model.num_mtp_layers=2", "parallel.layout='Ett|ttm||mL'"]
    config = quick_config(overrides=[*TWO_RANKS, *modules])
    mesh = validate(config, None)
    assert config.parallel.layers_per_stage == [2, 2, 0, 0]
    assert stage_layers(config, mesh) == [range(2), range(2, 5), range(5, 5), range(5, 6)]
    alone = [*modules[:2], "mesh.pp=4", "parallel.schedule=1F1B", "parallel.layout='E|tttt|mm|L'"]
    assert validate(quick_config(overrides=[*TWO_RANKS, *alone]), None).pp == 4  # rank 2 trains modules alone


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["parallel.layout='E|t|ttL'", "mesh.pp=2"], "there are 3. Set mesh.pp to a divisor of 3"),
        (
            ["parallel.layout='E|t|tt|tL'", "parallel.stages_per_rank=4"],
            "says 2. Leave it out, or leave out parallel.layout",
        ),
        (["parallel.layout='E|t|tt|tL'", "parallel.layers_per_stage=[1,1,1,1]"], r"says \[0, 1, 2, 1\]"),
        (["parallel.layout='E|t|tt|tL'", "mesh=fsdp", "mesh.pp=0"], "Set mesh.pp instead"),
        (["parallel.layout='E|t|tt|tmL'"], "has 1 m. Set model.num_mtp_layers=1"),
        (["parallel.layout='E|t|tt|tL'", "model=small_dsv3", "model.num_mtp_layers=1"], "has 0 m"),
        (["parallel.layout='Et|tt|tm|mL'", "model=small_dsv3", "model.num_mtp_layers=1"], "has 2 m"),
        (
            [
                "parallel.layout='Et|tt|tmm|L'",
                "model=small_dsv3",
                "model.num_mtp_layers=2",
                "parallel.schedule=DualPipeV",
            ],
            "more than one depth in a stage.*Give each m a stage of its own",
        ),
        (["parallel.layout='E|t|tt|tttL'"], "add up to 6, and model.num_layers is 4"),
        (["parallel.layout='Etttt||L'", "mesh.pp=3", "parallel.schedule=1F1B"], "rank 1 are all empty"),
        (["parallel.layout='Ett|t|t|L'", "parallel.schedule=1F1B"], "only Interleaved1F1B and the like run several"),
        (
            ["parallel.layout='Ett|t||t||L'", "mesh.pp=2", "parallel.schedule=ZBVZeroBubble"],
            "2 stages a rank: down .* up",
        ),
        (
            ["parallel.layout='Ettt||t|L'", "parallel.schedule=DualPipeV", "train.global_batch_size=4"],
            "2 [*] mesh.pp=4",
        ),
        (["parallel.layout='E||ttt|t||L'", "mesh.pp=3", "parallel.schedule=ZBVZeroBubble"], "of rank 1 are all empty"),
        (["parallel.layout='Ett|t|t|L'", "mesh.pp=1"], "with mesh.pp=1 the model is one stage"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_numbers(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(quick_config(overrides=[*TWO_RANKS, *overrides]), None)


@pytest.mark.parametrize(
    ("layout", "others", "says", "then"),
    [
        # What has as many stages and layers as it should is not told to have them.
        ("E|||ttttL", ["parallel.schedule=ZBVZeroBubble"], "Write 4 t, and fill at least one stage of each rank: [[0, 3], [1, 2]]", ["E|t||tttL"]),
        ("E||t|tt||tL", ["mesh.pp=3", "parallel.schedule=DualPipeV", "train.global_batch_size=12"], "each rank: [[0, 5], [1, 4], [2, 3]]",
         ["E|t|t|t||tL"]),
        ("Ett|tttL", ["parallel.schedule=1F1B"], "Write 4 t", ["Ett|ttL"]),
        # A number of stages that nobody typed is not blamed, and the ranks suit the schedule.
        ("Ett|tt|L", ["mesh.pp=0", "parallel.schedule=1F1B"], "Set mesh.pp=3", ["Ett|tt|L", "mesh.pp=3"]),
        ("Et|t|tt|L", ["mesh.pp=1"], "Set mesh.pp=2", ["Et|t|tt|L", "mesh.pp=2"]),
        ("Et|t|ttL", ["mesh.pp=1"], "Set mesh.pp=2 and write 4 stages", ["Et|t|t|tL", "mesh.pp=2"]),
        ("Et|t|ttL", ["mesh.pp=3"], "Set mesh.pp=2 and write 4 stages", ["Et|t|t|tL", "mesh.pp=2"]),
        ("Et|t|t|tL", ["parallel.schedule=GPipe"], "Set mesh.pp=4", ["Et|t|t|tL", "mesh.pp=4"]),
        ("Et|t|t|t||L", ["mesh.pp=2", "parallel.schedule=ZBVZeroBubble"], "Set mesh.pp=3", ["Et|t|t|t||L", "mesh.pp=3"]),
    ],
)  # fmt: skip
def test_a_layout_is_blamed_itself_and_the_way_out_is_one(
    layout: str, others: list[str], says: str, then: list[str]
) -> None:
    def check(text: str, *overrides: str) -> None:
        overrides = (*TWO_RANKS, *others, f"parallel.layout='{text}'", *overrides)
        validate(quick_config(overrides=["train.global_batch_size=16", *overrides]), None)

    with pytest.raises(ConfigError) as caught:
        check(layout)
    assert caught.value.key == "parallel.layout" and says in caught.value.remedy
    check(*then)
