"""Where FSDP would have nothing to do."""

from __future__ import annotations

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config


def stays_unsharded(config: Config, mesh: MeshShape) -> bool:
    """Whether the only rank multiplies by its parameters as they are stored, and one backward pass ends a gradient.

    FSDP would keep a copy of each weight to multiply by, and widen each gradient to add nothing to it. It does where
    parameters are stored in another dtype, or micro-batches are summed, which takes float32.
    """
    return (
        mesh.world_size == 1
        and config.optim.master_weights == "stochastic"
        and config.train.global_batch_size == config.train.micro_batch_size
    )
