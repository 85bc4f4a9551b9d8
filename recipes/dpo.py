"""Direct preference optimisation: the loop, top to bottom.

Copy and edit it: ``automoe recipe copy dpo``.

    config + mesh -> meshes -> a checkpoint's weights -> pairs of answers -> reference
        -> optimizer -> steps -> checkpoint

DPO differs from fine-tuning in its loss: both answers of a pair are in one row, and the loss raises
the preferred answer's log-probability and lowers the other's, relative to the initial weights.
"""

from __future__ import annotations

from datetime import timedelta

from automoe.config.mesh_shape import MeshShape
from automoe.config.recipe_args import DPOArgs
from automoe.config.schema import Config
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.parallel.pipeline import build_runner
from automoe.passes.trace import phase
from automoe.run.reference import open_reference
from automoe.run.routing import record_routing, replayed_routing
from automoe.run.run import open_run
from automoe.run.samples import Sampler
from automoe.run.services import open_data, open_store
from automoe.run.weights import export_weights, load_or_initialize
from automoe.training.context import RunContext
from automoe.training.preference import PreferenceLoss
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.training.validate import validate

# recipe_args.beta and recipe_args.loss; a copy of this file may declare a dataclass of its own
Args = DPOArgs


def main(config: Config, shape: MeshShape, context: RunContext) -> float | None:
    """Train ``config`` on this rank; return the last validation loss, else the training loss.

    None: the run stopped before it had a loss.
    """
    device = context.device
    train = config.train
    args = config.recipe_args

    # ---------------------------------------------------------------- data, model on both meshes
    meshes = build_meshes(shape, device, timedelta(seconds=config.launch.init_timeout_s))
    loader = open_data(config, meshes, pairs=True)
    store = open_store(config, meshes, context, loader)
    model_parts = build_parts(config, meshes)  # this rank's pipeline stages, without memory
    loaded = load_or_initialize(model_parts, config, device)
    runner = build_runner(model_parts, meshes, config, device)

    # ---------------------------------------------------------------- reference, optimizer, state
    reference = open_reference(config, runner, loader, meshes, context, store)
    if reference is None:
        return None  # asked to stop
    runner.set_loss(PreferenceLoss(args.beta, args.loss))
    optimizer = build_optimizer(
        list(model_parts.values()), config.optim, train.seed, meshes.stage_group()
    )
    state = TrainState(model_parts, optimizer, loader)
    resumed = store.load_latest(state)
    sampler = Sampler(config, runner, loader.tokenizer, meshes, device)

    # ---------------------------------------------------------------- the loop
    with open_run(config, shape, context, state, store, resumed) as run:
        run.describe_start(loaded)  # prints the weights' source and a sample row
        while state.step < train.steps and not run.stopping:
            run.begin_step()

            # one optimizer step over the global batch
            with phase("step", state.step + 1), record_routing(config, model_parts, state.step):
                batch = loader.next_step()
                forced_ids = replayed_routing(config, batch, state.step)
                inputs, num_label_tokens = prepare_inputs(batch, meshes, config, device, forced_ids)
                stats = forward_backward(state, runner, inputs | reference.inputs(batch), config)
                update = optimizer_step(state, stats, num_label_tokens, meshes, config, run.report)

            # record
            record = run.end_step(stats, update)
            if run.validates():
                record |= validate(
                    config, runner, loader, meshes, device, optimizer, reference.inputs
                )
                run.sample(sampler)
            run.write_or_go_back(record, stats)

            # save
            if run.saves():
                store.save(state, record.get("val_loss"), run.stopping)

        # ------------------------------------------------------------ leave
        exports = config.checkpoint.export_hf
        paths = {}
        # A run that stops in its last step leaves the export for the next start.
        context.preempted = state.step < train.steps or (run.stopping and exports)
        run.check_result()
        if exports and not run.stopping:
            paths["HF checkpoint"] = export_weights(config, model_parts, context.run_dir, optimizer)
        run.finish(paths)
    return run.objective
