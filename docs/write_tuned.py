"""Writes the meshes ``conf/mesh/tuned_*.yaml``: what ``automoe plan search=true`` finds; ``make tuned-meshes``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automoe.config.compose import compose_config, list_options
from automoe.config.schema import MeshConfig
from automoe.config.validate import validate
from automoe.planner.search import search
from automoe.planner.search_command import preset_text
from automoe.planner.views.search_view import levers

MESHES = Path(__file__).parents[1] / "conf" / "mesh"
FLAGSHIPS = [name.removeprefix("tuned_") for name in list_options("mesh") if name.startswith("tuned_")]


def tuned(name: str) -> str:
    """The preset of a flagship, on as many ranks as its cautious one, and a line on what no GPU has run."""
    cautious = compose_config(name, [f"mesh=first_{name}"])
    ranks = validate(cautious, None, "cuda").world_size
    best = search(replace(cautious, mesh=MeshConfig()), ranks, "cuda").found[0]
    first, *others = preset_text(best).splitlines(keepends=True)
    new = "".join(f"# Never run on GPUs: {', '.join(names)}.\n" for names in [levers(best.config)] if names)
    return "".join([first, "# Written by make tuned-meshes.\n", new, *others])


if __name__ == "__main__":
    for flagship in FLAGSHIPS:
        (MESHES / f"tuned_{flagship}.yaml").write_text(tuned(flagship))
