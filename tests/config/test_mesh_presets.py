"""Presets scale to any number of ranks and keep the relation between the two meshes that names them."""

from __future__ import annotations

import re

import pytest

from automoe.config.compose import parse_arguments
from automoe.config.mesh_shape import PRESETS, MeshShape, resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.errors import ConfigError
from automoe.launch import prepare
from tests.support.configurations import quick_config


def scaled(preset: str, ranks: int, **axes: int) -> MeshShape:
    return resolve_mesh(MeshConfig(preset=preset, **axes), ranks)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 16, 64, 128, 1024])
def test_every_preset_fits_every_number_of_ranks(preset: str, ranks: int) -> None:
    assert scaled(preset, ranks).world_size == ranks


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_what_the_names_promise(ranks: int) -> None:
    assert scaled("fsdp", ranks).describe("default") == f"dp_shard{ranks}"
    assert scaled("fsdp", ranks).describe("moe") == f"ep_shard{ranks}"
    assert scaled("fsdp_ep", ranks).ep == min(ranks, 8)
    for preset in ("tp_ep_dp", "coupled_5d"):
        shape = scaled(preset, ranks)
        assert shape.etp == shape.tp and shape.dp % shape.ep == 0, preset
    folded = scaled("folded_5d", ranks)
    assert folded.etp == 1 and folded.tp > 1 and folded.pp > 1
    assert folded.ep == min(ranks // folded.pp, 8), "over all of tp, cp and dp"


def test_folded_and_coupled_share_the_attention_mesh_where_all_axes_are_in_play() -> None:
    coupled, folded = scaled("coupled_5d", 16), scaled("folded_5d", 16)
    assert coupled.sizes("default") == folded.sizes("default") == (2, 1, 2, 2, 2)
    assert (coupled.ep, coupled.etp, folded.ep, folded.etp) == (2, 2, 8, 1)


def test_an_axis_beside_the_preset_wins() -> None:
    assert scaled("folded_5d", 16, ep=4).ep == 4
    assert scaled("folded_5d", 16, ep=4).ep_shard == 2
    named = scaled("folded_5d", 16, tp=1, ep=1)  # at what they are without a preset
    assert (named.tp, named.ep, named.world_size) == (1, 1, 16)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="folded_5d"):
        scaled("folded", 8)
    with pytest.raises(ConfigError, match="launch.num_ranks"):
        resolve_mesh(MeshConfig(preset="fsdp"), None)


@pytest.mark.parametrize(
    ("preset", "ranks", "typed", "chose"),
    [
        ("fsdp_ep", 4, {"pp": 4}, "ep=4"),
        ("tp_ep_dp", 8, {"pp": 4}, "tp=4, ep=2, etp=4"),
        ("folded_5d", 16, {"tp": 3}, "pp=2, cp=2, ep=8"),
        ("coupled_5d", 8, {"cp": 3}, "pp=2, tp=2, ep=2, etp=2"),
    ],
)
def test_an_axis_that_a_preset_chose_is_said_to_be_its_choice(
    preset: str, ranks: int, typed: dict[str, int], chose: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        scaled(preset, ranks, **typed)
    assert f"(mesh.preset={preset} chose {chose} for {ranks} ranks)" in caught.value.rule
    remedy = caught.value.remedy
    assert "launch.num_ranks" not in remedy, "for another number the preset chooses others"
    ways = re.split(", | or ", remedy.removeprefix("Nearest valid choices: ").removeprefix("Set "))
    for way in ways:
        axes = {axis: int(size) for axis, size in re.findall(r"mesh.(\w+)=(\d+)", way)}
        assert axes and scaled(preset, ranks, **(typed | axes)).world_size == ranks, way


def test_ranks_beside_a_preset_and_a_size_of_one_axis() -> None:
    words = ["mesh=tp_ep_dp", "mesh.dp_shard=4", "launch.num_ranks=4"]
    with pytest.raises(
        ConfigError, match=r"chose tp=2, ep=2, etp=2 for 4 ranks\): 8 ranks. Set mesh.dp_shard=-1 "
    ) as caught:
        prepare.prepare(parse_arguments(words))
    assert "Leave it out" not in caught.value.remedy
    prepare.prepare(parse_arguments([*words, "mesh.dp_shard=-1"]))


@pytest.mark.parametrize(
    ("name", "ranks", "tp", "ep", "pp"),
    [
        ("paper_mixtral_8x22b", 128, 2, 8, 8),
        ("paper_qwen2_57b_a14b", 64, 2, 4, 4),
        ("paper_mixtral_8x22b_g8t8", 128, 4, 8, 8),
        ("paper_llama3_8x70b", 256, 8, 8, 16),
    ],
)
def test_the_papers_mappings(name: str, ranks: int, tp: int, ep: int, pp: int) -> None:
    shape = resolve_mesh(quick_config(overrides=[f"mesh={name}"]).mesh, None)
    assert (shape.world_size, shape.tp, shape.ep, shape.pp, shape.etp) == (ranks, tp, ep, pp, 1)
