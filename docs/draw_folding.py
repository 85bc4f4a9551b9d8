"""Draws docs/images/folding.png: ``make docs-images``."""

from __future__ import annotations

from pathlib import Path

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.observe.mesh_view import draw_mesh
from automoe.observe.plot_style import save

# The example of docs/parallelism.md.
EXAMPLE = MeshConfig(pp=2, dp_shard=2, cp=1, tp=2, ep=4)

if __name__ == "__main__":
    path = Path(__file__).parent / "images" / "folding.png"
    path.parent.mkdir(exist_ok=True)
    print(f"written to {save(draw_mesh(resolve_mesh(EXAMPLE, None)), path, crop=True)}")
