"""A recipe of somebody's own: the training step, and one number a step in a file."""

from automoe.data.loader import Loader
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs


def main(config, shape, context):
    meshes = build_meshes(shape, context.device)
    parts = build_parts(config, meshes)
    materialize(parts, config, context.device)
    runner = build_runner(parts, meshes, config, context.device)
    optimizer = build_optimizer(list(parts.values()), config.optim, config.train.seed)
    state = TrainState(parts, optimizer, Loader(config, meshes.dp_rank, shape.dp))
    losses = []
    while state.step < config.train.steps:
        inputs, trained = prepare_inputs(state.loader.next_step(), meshes, config, context.device)
        stats = forward_backward(state, runner, inputs, config)
        optimizer_step(state, stats, trained, meshes, config)
        losses.append(stats.loss)
    if context.rank == 0:
        (context.run_dir / "losses.txt").write_text("\n".join(map(repr, losses)))
    return losses[-1]
