"""What is open for the length of a run: console, ``metrics.jsonl``, tracker and profiler."""

from __future__ import annotations

import gc
import math
import resource
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from automoe.checkpoint.store import CheckpointStore, Resumed
from automoe.checkpoint.train_state import TrainState
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError
from automoe.hf.headers import without_collection
from automoe.hf.read import Loaded
from automoe.model.adapters import describe_training, step_flops_per_token
from automoe.observe.console import Console
from automoe.observe.metrics import MetricsLog, last_objective, load_summary
from automoe.observe.profiler import profile_steps
from automoe.observe.sample_view import describe_row
from automoe.observe.trackers import Trackers, make_trackers
from automoe.parallel.groups import open_groups, set_timeouts
from automoe.storage.trace import phase
from automoe.training.context import RunContext
from automoe.training.hooks import Hooks
from automoe.training.samples import Sampler
from automoe.training.slow_ranks import SlowRanks
from automoe.training.stats import StepStats, max_over_ranks
from automoe.training.step import Update

NAMED_DOCUMENTS = 100  # of a skipped step's batch, in its record


@contextmanager
def open_run(
    config: Config,
    shape: MeshShape,
    context: RunContext,
    state: TrainState,
    store: CheckpointStore,
    resumed: Resumed | None,
) -> Iterator[Run]:
    """A ``Run``; what is open in it is closed on every way out, so one that dies keeps its record and its trace."""
    console = Console(config, shape, enabled=context.rank == 0)
    console.start(resume_step=state.step)
    for line in describe_training(config):
        for part in textwrap.wrap(line, 66):  # behind a note's margin: 80 columns
            console.note(part)
    with ExitStack() as opened:
        log = trackers = None
        if context.rank == 0:
            # Another run's record is not this one's.
            record_ends = resumed.step if resumed and resumed.own else None
            log = MetricsLog(context.run_dir, record_ends, console.warn)
            trackers = make_trackers(config, context.run_dir, record_ends, console.warn)
        if config.launch.gc_every:
            opened.enter_context(without_collection())
        opened.enter_context(profile_steps(config, context.run_dir, context.rank))
        hooks = Hooks()
        store.attach(console.note, console.warn, lambda folder: hooks.call("run.save", run, folder))
        run = Run(config, shape, context, state, store, resumed, console, log, trackers, hooks)
        if context.world_size > 1:
            console.note(str(open_groups()))
        opened.push(run.close_record)
        hooks.call("run.start", run)
        yield run


class Run:
    """The record of a run. Every rank has one and calls every method; rank 0 alone prints and writes.

    Attributes:
        stopping: some rank was asked to stop: all leave after this step.
        objective: what the run came to so far: the newest validation loss, else the newest training loss.
        note: prints a line for the user.
    """

    def __init__(
        self,
        config: Config,
        shape: MeshShape,
        context: RunContext,
        state: TrainState,
        store: CheckpointStore,
        resumed: Resumed | None,
        console: Console,
        log: MetricsLog | None,
        trackers: Trackers | None,
        hooks: Hooks,
    ) -> None:
        self.config, self.shape, self.context, self.state = config, shape, context, state
        self.store, self.console, self.note, self._log, self._trackers = store, console, console.note, log, trackers
        self._hooks = hooks
        self._slow_ranks = SlowRanks(context, config.launch.probe_every, self.console.note)
        self._flops = step_flops_per_token(config)
        self._peak_flops = _peak_flops(config, context.device)
        self._began = 0.0
        self._answers: tuple[list[dict[str, str]], float] | None = None
        self._resumed, self._first_step, self._save_is_due = resumed, state.step, False
        self.stopping = False
        self.objective: float | None = None
        if state.step >= config.train.steps:
            self.objective = last_objective(context.run_dir, state.step)
            self.note(f"already at step {state.step} of {config.train.steps}: nothing is left to train")
            self.note(f"train.steps={2 * config.train.steps} goes on; checkpoint.resume=never starts over")

    def describe_start(self, loaded: Loaded | None) -> None:
        """Print which weights the run starts from, and for conversations what became of them and one row as text.

        Args:
            loaded: what was read from ``model.hf_path``; None if the weights are random.
        """
        loader = self.state.loader
        assert loader is not None
        conversations = loader.describe()
        if loaded is not None:
            self.note(str(loaded))
        elif conversations:
            self.note("from random weights, since model.hf_path is not set")
        for line in conversations:
            self.note(line)
        if self.context.rank == 0 and loader.corpus.trained is not None:
            row = loader.row(0)
            tokens, labels, doc_ids = (one[0].numpy() for one in (row.tokens, row.labels, row.doc_ids))
            self.console.row(describe_row(tokens, labels, doc_ids, loader.tokenizer))

    def begin_step(self) -> None:
        """Start the step's clock; a background save that failed is reported here.

        Python's garbage is collected at the same steps on all ranks: where each does when it likes, all wait for each.
        """
        self.store.poll()
        every = self.config.launch.gc_every
        if every and self.state.step % every == 0:
            gc.collect(1)  # what a step leaves is young
        self._slow_ranks.begin_step(self.state.step + 1)
        self._began = time.perf_counter()

    def end_step(self, stats: StepStats, update: Update) -> dict[str, Any]:
        """Stop the clock and return the step's record, its validation apart."""
        config, train, state = self.config, self.config.train, self.state
        over_ranks = update.over_ranks
        assert "stop" in over_ranks, "optimizer_step(..., run.report) tells this rank's values to the others"
        if self.state.step == self._first_step + 1:  # every rank has come to the update
            set_timeouts(config.launch.timeout_s)
            # The update allocated the optimizer's moments.
            over_ranks = {
                **over_ranks,
                **max_over_ranks({"peak_memory_bytes": _peak_memory_bytes(self.context.device)}),
            }
        self.stopping = bool(over_ranks["stop"])
        self._save_is_due = self._save_is_due or bool(over_ranks["save_due"])
        seconds = time.perf_counter() - self._began
        tokens_per_second = train.global_batch_size * train.seq_len / seconds
        if not update.skipped:  # the loss of such a step may be no number
            self.objective = stats.loss
        record: dict[str, Any] = {
            "step": state.step,
            "loss": stats.loss,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "tokens": state.tokens,
            "tokens_per_second": tokens_per_second,
            "mfu": None,
            "peak_memory_bytes": int(over_ranks["peak_memory_bytes"]),
            "step_seconds": seconds,
            **stats.balance_losses,
            **stats.metrics,
            "skipped": state.skipped,
        }
        if update.skipped:
            record |= self._skip_record(update)
            self.console.warn(f"step {state.step} skipped: {_skip_text(record)}")
        if self._peak_flops:
            mfu = self._flops.mfu(tokens_per_second / self.shape.world_size, self._peak_flops)
            record["mfu"], record["mfu_full_attention"] = mfu
        record |= load_summary(stats.expert_counts) | self.store.record(seconds)
        if config.moe.capacity_factor:
            record["dropped_share"] = stats.dropped_share
        if train.fp8 == "delayed":
            record |= max_over_ranks({"fp8_clipped_share": update.fp8_clipped_share})
        return record | self._slow_ranks.record(over_ranks)

    @property
    def report(self) -> dict[str, float]:
        """Values of this rank that the step's max-reduction combines over ranks; of clocks, only rank 0's counts."""
        save_due = self.context.rank == 0 and self.store.minutes_are_up()
        return {
            "stop": self.context.stop.requested,
            "save_due": save_due,
            "peak_memory_bytes": _peak_memory_bytes(self.context.device),
            **self._slow_ranks.report(),
        }

    def validates(self) -> bool:
        """Whether the step just taken is followed by a validation."""
        train, step = self.config.train, self.state.step
        return bool(train.val_every) and (step % train.val_every == 0 or step == train.steps or self.stopping)

    def sample(self, sampler: Sampler) -> None:
        """Let the model answer ``observe.samples``; ``write`` shows the answers below the step. Collective."""
        if sampler.texts:
            began = time.perf_counter()
            self._answers = sampler.generate(), time.perf_counter() - began

    def saves(self) -> bool:
        """Whether the state is to be saved: every ``checkpoint.every`` steps, after ``checkpoint.every_minutes``,
        at the end and when asked to stop.

        A step that was skipped is not the newest to go on from: the next one that is taken is saved in its place. Where
        none was taken since the start or the resume there is nothing to save.
        """
        state, checkpoint = self.state, self.config.checkpoint
        if not checkpoint.saves:
            return False
        self._save_is_due |= checkpoint.every > 0 and state.step % checkpoint.every == 0
        if not self._took_a_step():
            return False
        last = state.step >= self.config.train.steps or self.stopping
        due = last or (self._save_is_due and not state.skipped)
        self._save_is_due &= not due
        return due

    def write(self, record: Mapping[str, Any], stats: StepStats) -> None:
        """Print, record and track a step's record, in which a validation is by now, with what plugins measure.

        Where every step since the resume was skipped, up to ``train.max_skipped`` or the last one, the state goes back
        to the checkpoint before.

        Raises:
            AutomoeError: it is the last of ``train.max_skipped`` skipped steps in a row, or of a run that took none.
        """
        with phase("record", self.state.step):
            self.objective = record.get("val_loss", self.objective)
            self.console.step(record)
            record = {**record, **self._hooks.numbers(self, record)}
            if self._log is not None and self._trackers is not None:
                self._log.write(record, stats.expert_counts)
                self._trackers.log(record)
            self._write_answers()
        state, train = self.state, self.config.train
        over = state.skipped >= train.max_skipped
        if over or (state.step >= train.steps and not self._took_a_step()):
            self.store.poll(wait=True)  # what was saved before all this is not lost with the run
            if not self._took_a_step() and self._fall_back():
                return
            optim = self.config.optim
            what = "in a row were skipped (train.max_skipped)" if over else "were skipped, and none was taken"
            gave_up = f". Checkpoints given up before: {'; '.join(self.context.fell_back)}"
            raise AutomoeError(
                f"{min(state.skipped, state.step)} steps {what}, the last step "
                f"{state.step}: {_skip_text(record)}. metrics.jsonl names the rows and documents of each. Lower "
                f"optim.lr ({optim.lr}), raise optim.warmup_steps ({optim.warmup_steps}), or look at that data"
                f"{gave_up if self.context.fell_back else ''}"
            )

    def _write_answers(self) -> None:
        if self._answers is not None:
            (samples, seconds), self._answers = self._answers, None
            self.console.samples(samples, seconds)
            if self._log is not None and self._trackers is not None:
                self._log.write_samples(self.state.step, samples)
                self._trackers.texts(self.state.step, "samples", samples)

    def _took_a_step(self) -> bool:
        """Whether an update was made since the start, the resume or the last fall back."""
        return self.state.step - self._first_step > self.state.skipped

    def _fall_back(self) -> bool:
        """Go back to the checkpoint before the one that was resumed; whether there is one."""
        before, earlier = self._resumed, self.state.step
        self._resumed = before and self.store.fall_back(self.state, before)
        if before is None or self._resumed is None:
            return False
        self._first_step, self._save_is_due = self.state.step, False
        self.context.fell_back.append(
            f"no step from {before.step + 1} to {earlier} could be taken, gone back to step {self.state.step}"
        )
        self.console.warn(f"{self.context.fell_back[-1]}. Give the run a lower optim.lr if it comes to the same end")
        if self._log is not None and self._trackers is not None:
            self._log.close()
            self._log = MetricsLog(self.context.run_dir, self.state.step, self.console.warn)
            self._trackers.rewind(self.state.step)
        return True

    def close_record(self, error: object, *_: object) -> None:
        """Write what of the record waits, on every way out; ``error`` is what ended the run, None where nothing did."""
        if self._log is not None and self._trackers is not None:
            self._log.close()
            self._trackers.finish("failed" if error else "done")

    def check_result(self) -> None:
        """After the last step: refuse to call a run done whose result is no number; an export may take its time.

        Raises:
            AutomoeError: the last validation or training loss is not finite.
        """
        set_timeouts(self.config.launch.init_timeout_s)
        if self.state.step >= self.config.train.steps and not math.isfinite(self.objective or 0.0):
            raise AutomoeError(
                f"the run came to step {self.state.step}, and its last loss is {self.objective}: no result. Lower "
                f"optim.lr ({self.config.optim.lr}), or look at the last records in metrics.jsonl"
            )

    def finish(self, paths: Mapping[str, str | Path]) -> None:
        """Close the record and print the summary, with the ``paths`` of results by their names."""
        self._hooks.call("run.finish", self)
        if self._log is not None and self._trackers is not None:
            self._log.close()
            self._trackers.finish("preempted" if self.context.preempted else "done")
            paths = {**paths, **self._trackers.places}
        self.console.finish(paths)

    def _skip_record(self, update: Update) -> dict[str, Any]:
        """What the record of a skipped step also says: the reason, and the batch by rows and documents."""
        loader = self.state.loader
        assert loader is not None
        first, last, documents = loader.last_batch()
        return {
            "skip_reason": update.skip_reason or "another rank's loss or gradient is not finite",
            "skipped_rows": [first, last],
            "skipped_documents": documents[:NAMED_DOCUMENTS],
            "num_skipped_documents": len(documents),
        }


def _skip_text(record: Mapping[str, Any]) -> str:
    """A skipped step's record in a line."""
    (first, last), names = record["skipped_rows"], record["skipped_documents"]
    more = record["num_skipped_documents"] - 3
    listed = ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
    return f"{record['skip_reason']}; rows {first}-{last} of the training data, from {listed}"


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
