from __future__ import annotations

import re

import pytest

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.observe.summary import render_mesh_text

SHAPES = {
    "one": ({}, 1),
    "default run": ({"pp": 2, "ep": 2}, 4),
    "stages only": ({"pp": 4}, 4),
    "data only": ({}, 8),
    "folded": ({"pp": 2, "dp_shard": 2, "cp": 2, "ep": 4}, 8),
    "odd": ({"ep": 3}, 6),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 16, "ep": 8}, 32),
    "all axes": ({"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 2}, 64),
    "long axis": ({}, 64),
    "flagship": ({"pp": 16, "ep": 64}, 1024),
}


def shape(name: str):
    axes, ranks = SHAPES[name]
    return resolve_mesh(MeshConfig(**axes), ranks)


@pytest.mark.parametrize("name", SHAPES)
def test_fits_a_terminal(name):
    assert max(len(line) for line in render_mesh_text(shape(name)).splitlines()) < 100


@pytest.mark.parametrize("name", ["default run", "stages only", "data only", "folded", "odd", "hsdp", "all axes"])
def test_the_grid_agrees_with_the_coordinates_of_every_rank(name):
    """Reads the text back: a rank's row and column labels must be its coordinates."""
    mesh = shape(name)
    for view, text in zip(("default", "moe"), render_mesh_text(mesh).split("\n\n")[::2], strict=False):
        lines = text.splitlines()[1:]
        above = {m[1]: m[2].split() for line in lines if (m := re.match(r"\s*(\w+) :(.*)", line))}
        seen = []
        for line in lines:
            if "|" not in line:
                continue
            label, ranks = line.split("|")
            for column, rank in enumerate(map(int, ranks.split())):
                shown = {axis: int(n) for axis, n in re.findall(r"(\w+) (\d+)", label)}
                shown |= {axis: int(positions[column]) for axis, positions in above.items()}
                expected = {axis: n for axis, n in mesh.coordinates(rank, view).items() if getattr(mesh, axis) > 1}
                assert shown == expected, f"{view} rank {rank}"
                seen.append(rank)
        assert seen == list(range(mesh.world_size))


def test_exact_picture_of_a_folded_mesh():
    assert render_mesh_text(shape("folded"), groups=False) == (
        "default mesh: pp2 x dp_shard2 x cp2 = 8 ranks\n"
        "  dp_shard :  0  0  1  1\n"
        "        cp :  0  1  0  1\n"
        "            ------------\n"
        "      pp 0 |  0  1  2  3\n"
        "      pp 1 |  4  5  6  7\n"
        "\n"
        "moe mesh: pp2 x ep4 = 8 ranks\n"
        "    ep :  0  1  2  3\n"
        "        ------------\n"
        "  pp 0 |  0  1  2  3\n"
        "  pp 1 |  4  5  6  7\n"
    )


def test_a_thousand_ranks_are_told_by_their_groups():
    text = render_mesh_text(shape("flagship"))
    assert "|" not in text
    assert re.search(r"ep +64 +16 +0 1 2 3 4 5 \.\.\. 63", text)
    assert re.search(r"pp +16 +64 +0 64 128 192 256 320 \.\.\. 960", text)
