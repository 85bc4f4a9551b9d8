"""Upcycling on a mesh: convert a dense checkpoint into an equivalent mixture of experts.

    dense checkpoint -> shards of the mixture -> HuggingFace checkpoint, proven equal

    automoe train recipe=upcycle model.hf_path=DENSE model.upcycle=true model.num_experts=8 ...

The mixture may be too large for one process: every rank reads only the parts of the dense FFNs that
its own experts are made of. To train right after loading, without writing the mixture, leave
``recipe=upcycle`` out.
"""

from __future__ import annotations

from datetime import timedelta

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import ConfigError
from automoe.hf.read import load_hf
from automoe.hf.upcycle import upcycled_model
from automoe.hf.write import to_hf
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_parts
from automoe.training.context import RunContext


def main(config: Config, shape: MeshShape, context: RunContext) -> None:
    """Write ``config.model.hf_path`` as a mixture to ``run_dir/hf``.

    Raises:
        ConfigError: the configuration names no dense checkpoint.
    """
    if not (config.model.hf_path and config.model.upcycle):
        rule = "recipe=upcycle makes a mixture of experts out of a dense checkpoint"
        raise ConfigError(
            "model.upcycle",
            config.model.upcycle,
            rule,
            "Set model.hf_path=DENSE model.upcycle=true",
        )
    meshes = build_meshes(shape, context.device, timedelta(seconds=config.launch.init_timeout_s))
    model_parts = build_parts(config, meshes)
    allocate(model_parts, context.device)
    _, dense_keys = upcycled_model(config.model, config.train.seed)
    loaded = load_hf(model_parts, config.model.hf_path, keys=dense_keys, progress=True)
    written = to_hf(model_parts, context.run_dir / "hf", overwrite=True)
    if context.rank == 0:
        print(f"{loaded}\nsaved {written}", flush=True)
