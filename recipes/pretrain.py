"""Pretraining and fine-tuning: the loop, top to bottom.

Copy and edit it: ``automoe recipe copy pretrain``.

    config + mesh -> meshes -> loader -> model parts -> optimizer -> steps -> checkpoint

Fine-tuning is the same loop with other settings: ``model.hf_path`` names the initial weights, and
``data=chat`` packs whole conversations into rows, in which only the answers have labels.

Every rank runs this file. Rank 0 alone prints and records.
"""

from __future__ import annotations

from datetime import timedelta

from automoe.checkpoint.store import CheckpointStore
from automoe.checkpoint.train_state import TrainState
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.data.loader import Loader
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.pipeline import build_runner
from automoe.storage.trace import phase
from automoe.training.context import RunContext
from automoe.training.routing import replayed_routing
from automoe.training.run import open_run
from automoe.training.samples import Sampler
from automoe.training.stats import same_on_all_ranks
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs, validate
from automoe.training.weights import export_weights, first_weights


def main(config: Config, shape: MeshShape, context: RunContext) -> float | None:
    """Train ``config`` on this rank; return the last validation loss, else the training loss."""
    device = context.device
    train = config.train

    # ---------------------------------------------------------------- data, model on both meshes
    meshes = build_meshes(shape, device, timedelta(seconds=config.launch.init_timeout_s))
    store = CheckpointStore(config, shape, context.run_dir)
    loader = Loader(config, meshes.dp_rank, shape.dp)
    same_on_all_ranks(loader.fingerprint(), "the training data")
    store.check(loader)  # fail now, not after the weights are read or at the first save
    model_parts, loaded = first_weights(config, meshes, device)  # this rank's pipeline stages
    runner = build_runner(model_parts, meshes, config, device)

    # ---------------------------------------------------------------- optimizer, state
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
            with phase("step", state.step + 1):
                batch = loader.next_step()
                forced_ids = replayed_routing(config, batch, state.step)
                inputs, num_label_tokens = prepare_inputs(batch, meshes, config, device, forced_ids)
                stats = forward_backward(state, runner, inputs, config)
                update = optimizer_step(state, stats, num_label_tokens, meshes, config, run.report)

            # record
            record = run.end_step(stats, update)
            if run.validates():
                record |= validate(config, runner, loader, meshes, device, optimizer)
                run.sample(sampler)
            run.write(record, stats)  # may go back to the checkpoint before

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
