"""Pretraining: the loop, top to bottom. Copy it and make it yours.

    config + mesh -> meshes -> model parts -> optimizer -> loader -> steps -> checkpoint

Every rank runs this file. Rank 0 alone prints and records.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from automoe.checkpoint.saver import Saver
from automoe.checkpoint.store import CheckpointStore
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.cost.flops import train_flops_per_token
from automoe.data.loader import Loader
from automoe.errors import AutomoeError
from automoe.launch.ranks import RunContext
from automoe.observe.console import Console
from automoe.observe.metrics import MetricsLog, last_objective, load_summary
from automoe.observe.profiler import StepProfiler
from automoe.observe.trackers import make_tracker
from automoe.optim.adamw import build_optimizer, set_learning_rate
from automoe.optim.grad_norm import clip_, global_grad_norm
from automoe.optim.schedule import learning_rate
from automoe.parallel.agree import same_on_all_ranks
from automoe.parallel.fp8 import update_scales
from automoe.parallel.mesh import Meshes, build_meshes
from automoe.parallel.parallelize import allocate, build_parts, materialize
from automoe.parallel.pipeline import StepRunner, build_runner, prepare_inputs
from automoe.parallel.routing import record_routing, replayed_routing
from automoe.parallel.shared_gradients import counted_parameters
from automoe.training.skip import reason_to_skip, remember
from automoe.training.state import TrainState
from automoe.training.stats import gather_stats, max_over_ranks, sum_over_ranks, update_balance_state
from tests.support.fault_points import reach

NAMED_DOCUMENTS = 100  # of a skipped step's batch, in its record


def main(config: Config, shape: MeshShape, context: RunContext) -> float | None:
    """Train ``config`` on this rank; returns the last validation loss, else the last training loss."""
    with ExitStack() as open_files:  # closed on every way out: a run that dies keeps its record and its trace
        return pretrain(config, shape, context, open_files)


def pretrain(config: Config, shape: MeshShape, context: RunContext, open_files: ExitStack) -> float | None:
    """``main``, with a place for what must be closed."""
    reach("started")
    device, train = context.device, config.train
    lead = context.rank == 0

    # ---------------------------------------------------------------- model on both meshes
    meshes = build_meshes(shape, device, timedelta(seconds=config.launch.timeout_s))
    store = CheckpointStore(config, context.run_dir)
    store.check()  # what would stop a save is found before weights are read
    parts = build_parts(config, meshes)
    loaded = None
    if config.model.hf_path:
        from automoe.hf.reader import load_hf

        allocate(parts, device)
        loaded = load_hf(parts, config.model.hf_path, progress=True)
    else:
        materialize(parts, config, device)
    runner = build_runner(parts, meshes, config, device)

    # ---------------------------------------------------------------- optimizer, data, state
    optimizer = build_optimizer(list(parts.values()), config.optim, config.train.seed)
    loader = Loader(config, meshes.dp_rank, shape.dp)
    same_on_all_ranks(loader.fingerprint(), "the training data")
    state = TrainState(parts, optimizer, loader)
    resumed = store.load_latest(state)

    # ---------------------------------------------------------------- what the user sees
    console = Console(config, shape, enabled=lead)
    console.start(resume_step=state.step)
    if loaded is not None:
        console.note(str(loaded))
    log = None
    if lead:
        # Another run's record is not this one's.
        record_ends = resumed.step if resumed and resumed.own else None
        log = open_files.enter_context(MetricsLog(context.run_dir, record_ends))
    tracker = make_tracker(config, context.run_dir, console.warn) if lead else None
    flops = train_flops_per_token(config.model, train.seq_len)
    peak = _peak_flops(config, device)
    profiler = open_files.enter_context(StepProfiler(config, context.run_dir, context.rank))
    saver = Saver(store, config, console.note, console.warn)

    # ---------------------------------------------------------------- the loop
    objective = None
    if state.step >= train.steps:
        objective = last_objective(context.run_dir)
        console.note(f"already at step {state.step} of {train.steps}")
    stopping = False
    while state.step < train.steps and not stopping:
        saver.poll()  # a background save that failed is heard of here
        started = time.perf_counter()
        profiler.begin(state.step + 1)
        reach("step_begin", state.step + 1)

        # forward and backward over the step's micro-batches
        batch = loader.next_step()
        forced_ids = replayed_routing(config, batch, state.step)
        inputs, trained = prepare_inputs(batch, meshes, config, device, forced_ids)
        reach("forward", state.step + 1)
        with record_routing(config, parts.values(), state.step):
            loss_share = runner.train(inputs)
        reach("before_collective", state.step + 1)
        stats = gather_stats(loss_share, parts.values(), config)

        # one gradient norm over both meshes and all stages; every rank sees the same number
        lr = learning_rate(config.optim, state.step, train.steps)
        norm = global_grad_norm(counted_parameters(parts.values()), meshes.group("pp"))

        # the update, unless any rank has a reason against it
        why_not = reason_to_skip(stats.loss, float(norm), state.recent_losses, train)
        (skips,) = max_over_ranks(float(why_not is not None))
        # Before the update, for which the host would have to wait otherwise.
        clipped = update_scales(parts.values(), meshes, stepped=not skips)
        if not skips:
            clip_(state.parameters(), norm, train.grad_clip)
            set_learning_rate(optimizer, lr)
            optimizer.step()
            update_balance_state(stats, parts.values(), config)
            remember(stats.loss, state.recent_losses, train)
            state.skipped = 0
        else:
            state.skipped += 1
        optimizer.zero_grad()
        state.step += 1
        state.tokens += trained
        objective = stats.loss
        reach("step_end", state.step)
        profiler.end(state.step)

        # record
        stopping = context.any_rank_stops()
        memory, clipped = max_over_ranks(_peak_memory_bytes(device), clipped)
        seconds = time.perf_counter() - started
        record: dict[str, Any] = {
            "step": state.step,
            "loss": stats.loss,
            "grad_norm": float(norm),
            "lr": lr,
            "tokens": state.tokens,
            "tokens_per_second": train.global_batch_size * train.seq_len / seconds,
            "mfu": None,
            "peak_memory_bytes": int(memory),
            "step_seconds": seconds,
            "seq_balance_loss": stats.sequence_balance,
            "global_balance_loss": stats.lagged_balance,
            "micro_batch_balance_loss": stats.micro_batch_balance,
            "z_loss": stats.z_loss,
            "skipped": state.skipped,
        }
        if skips:
            record |= skip_record(why_not, loader)
            console.warn(f"step {state.step} skipped: {skip_text(record)}")
        if peak:
            record["mfu"], record["mfu_full_attention"] = flops.mfu(
                record["tokens_per_second"] / shape.world_size, peak
            )
        record |= asdict(load_summary(stats.expert_counts)) | saver.record(seconds)
        if config.moe.capacity_factor:
            record["dropped_share"] = stats.dropped_share
        if train.fp8 == "delayed":
            record["fp8_clipped_share"] = clipped
        if train.val_every and (state.step % train.val_every == 0 or state.step == train.steps or stopping):
            record |= validate(config, runner, loader, meshes, device)
            objective = record.get("val_loss", objective)
        console.step(record)
        if log is not None and tracker is not None:
            log.write(record, stats.expert_counts)
            tracker.log(record)
        reach("recorded", state.step)
        if state.skipped >= train.max_skipped:
            saver.finish()  # what was saved before all this is not lost with the run
            raise AutomoeError(
                f"{state.skipped} steps in a row were skipped (train.max_skipped), the last step {state.step}: "
                f"{skip_text(record)}. metrics.jsonl names the rows and documents of each. Lower optim.lr "
                f"({config.optim.lr}), raise optim.warmup_steps ({config.optim.warmup_steps}), or look at that data"
            )

        # save
        if saver.due(state.step, stopping):
            saver.save(state, record.get("val_loss"), stopping)

    # ---------------------------------------------------------------- leave
    exports = config.checkpoint.export_hf
    context.preempted = state.step < train.steps or (stopping and exports)  # the export is for the next start
    paths: dict[str, Any] = {}
    if exports and not stopping:
        from automoe.hf.writer import export_and_verify

        paths["HF checkpoint"] = export_and_verify(parts, context.run_dir / "hf", config)
    if log is not None and tracker is not None:
        log.close()
        tracker.finish()
    console.finish(paths)
    return objective


def skip_record(why_not: str | None, loader: Loader) -> dict[str, Any]:
    """What the record of a skipped step says besides: the reason, and the batch by rows and documents."""
    first, last = loader.last_rows()
    documents = loader.documents(first, last)
    return {
        "skip_reason": why_not or "another rank's loss or gradient is not finite",
        "skipped_rows": [first, last],
        "skipped_documents": documents[:NAMED_DOCUMENTS],
        "num_skipped_documents": len(documents),
    }


def skip_text(record: Mapping[str, Any]) -> str:
    """A skipped step's record in a line."""
    (first, last), names = record["skipped_rows"], record["skipped_documents"]
    more = record["num_skipped_documents"] - 3
    listed = ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
    return f"{record['skip_reason']}; rows {first}-{last} of the training data, from {listed}"


def validate(
    config: Config, runner: StepRunner, loader: Loader, meshes: Meshes, device: torch.device
) -> Mapping[str, float]:
    """Mean loss in nats a token, and bits a byte of text, over the validation batches."""
    nats = tokens = text_bytes = 0.0
    reads_text = all(meshes.coordinate(axis) == 0 for axis in ("pp", "cp", "tp"))  # one rank for each row
    for batch in loader.validation_batches(config.train.val_batches):
        inputs, trained = prepare_inputs(batch, meshes, config, device)
        share = runner.evaluate(inputs)
        loss, num_bytes = sum_over_ranks(share, float(batch.num_bytes * reads_text), device=device)
        nats, tokens, text_bytes = nats + loss * trained, tokens + trained, text_bytes + num_bytes
    if not tokens:
        return {}
    return {"val_loss": nats / tokens, "val_bits_per_byte": nats / math.log(2) / max(text_bytes, 1.0)}


def _peak_flops(config: Config, device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of one rank's device: as configured, else from torchtitan's table; None if unknown."""
    if config.cluster.peak_flops:
        return config.cluster.peak_flops
    if device.type != "cuda":
        return None
    from automoe.interop.torchtitan import peak_flops

    return peak_flops(torch.cuda.get_device_name(device))


def _peak_memory_bytes(device: torch.device) -> int:
    """High-water mark of this rank: device allocations on CUDA, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
