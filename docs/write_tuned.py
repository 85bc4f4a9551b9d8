"""Writes the meshes ``conf/mesh/tuned_*.yaml``: what ``automoe plan search=true`` finds; ``make tuned-meshes``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automoe.config.compose import compose_config, list_options
from automoe.config.schema import MeshConfig
from automoe.config.validate import validate
from automoe.planner.search import search
from automoe.planner.search_command import preset_text

MESHES = Path(__file__).parents[1] / "conf" / "mesh"
FLAGSHIPS = [name.removeprefix("tuned_") for name in list_options("mesh") if name.startswith("tuned_")]


def tuned(name: str) -> str:
    """The preset of a flagship, on as many ranks as its present one, with nothing else held but its own settings."""
    cautious = compose_config(name, [f"mesh=first_{name}"])
    ranks = validate(cautious, None, "cuda").world_size
    return preset_text(search(replace(cautious, mesh=MeshConfig()), ranks, "cuda").found[0])


if __name__ == "__main__":
    for flagship in FLAGSHIPS:
        (MESHES / f"tuned_{flagship}.yaml").write_text(tuned(flagship))
