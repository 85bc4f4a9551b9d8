"""Upcycling on a mesh: convert a dense checkpoint into an equivalent mixture of experts.

    dense checkpoint -> shards of the mixture -> HuggingFace checkpoint, proven equal

    automoe train recipe=upcycle model.hf_path=DENSE model.upcycle=true model.num_experts=8 ...

The mixture may be too large for one process: every rank reads only the parts of the dense FFNs that
its own experts are made of. To train right after loading, without writing the mixture, leave
``recipe=upcycle`` out.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import CheckpointConfig, Config
from automoe.config.train_schema import LoraConfig
from automoe.errors import ConfigError
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.run.weights import export_weights, load_or_initialize
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
    # Settings of a training that may follow; the mixture keeps the dense checkpoint's tokenizer.
    config = replace(config, data=DataConfig(), lora=LoraConfig(), checkpoint=CheckpointConfig())
    meshes = build_meshes(shape, context.device, timedelta(seconds=config.launch.init_timeout_s))
    model_parts = build_parts(config, meshes)
    loaded = load_or_initialize(model_parts, config, context.device)
    written = export_weights(config, model_parts, context.run_dir)
    if context.rank == 0:
        print(f"{loaded}\nsaved {written}", flush=True)
