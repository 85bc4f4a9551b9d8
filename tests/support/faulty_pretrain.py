"""The shipped pretraining recipe with the faults that ``AUTOMOE_FAULT`` asks for (``fault_points.py``)."""

from __future__ import annotations

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.config.shipped import load_recipe
from automoe.training.context import RunContext
from tests.support.fault_points import fault_point, faults


def main(config: Config, shape: MeshShape, context: RunContext) -> float | None:
    """``pretrain``'s main, with faults."""
    with faults():
        fault_point("started")
        return load_recipe("pretrain").main(config, shape, context)
