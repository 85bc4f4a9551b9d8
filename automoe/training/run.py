"""What is open for the length of a run: console, ``metrics.jsonl``, tracker, profiler and the saver of checkpoints."""

from __future__ import annotations

import gc
import math
import resource
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from automoe.checkpoint.store import CheckpointStore, Resumed
from automoe.checkpoint.train_state import TrainState
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError, SaveError
from automoe.hf.headers import without_collection
from automoe.model.adapters import describe_training
from automoe.model.flops import step_flops_per_token
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
        saver = Saver(store, config, console.note, console.warn, lambda folder: hooks.call("run.save", run, folder))
        run = Run(config, shape, context, state, saver, resumed, console, log, trackers, hooks)
        if context.world_size > 1:
            console.note(str(open_groups()))
        opened.push(run.close_record)
        hooks.call("run.start", run)
        yield run


class Run:
    """The record of a run. Every rank has one and calls every method; rank 0 alone prints and writes.

    Attributes:
        saver: of checkpoints.
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
        saver: Saver,
        resumed: Resumed | None,
        console: Console,
        log: MetricsLog | None,
        trackers: Trackers | None,
        hooks: Hooks,
    ) -> None:
        self.config, self.shape, self.context, self.state = config, shape, context, state
        self.saver, self.console, self.note, self._log, self._trackers = saver, console, console.note, log, trackers
        self._hooks = hooks
        self._slow_ranks = SlowRanks(context, config.launch.probe_every, self.console.note)
        state.asks = self._asks
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

    def show_row(self) -> None:
        """Print a row of conversations as text, with the tokens set off that are trained; nothing of other data."""
        loader = self.state.loader
        if self.context.rank == 0 and loader is not None and loader.corpus.trained is not None:
            row = loader.row(0)
            tokens, labels, doc_ids = (one[0].numpy() for one in (row.tokens, row.labels, row.doc_ids))
            self.console.row(describe_row(tokens, labels, doc_ids, loader.tokenizer))

    def begin_step(self) -> None:
        """Start the step's clock; a background save that failed is reported here.

        Python's garbage is collected at the same steps on all ranks: where each does when it likes, all wait for each.
        """
        self.saver.poll()
        every = self.config.launch.gc_every
        if every and self.state.step % every == 0:
            gc.collect(1)  # what a step leaves is young
        self._slow_ranks.begin_step(self.state.step + 1)
        self._began = time.perf_counter()

    def end_step(self, stats: StepStats, update: Update) -> dict[str, Any]:
        """Stop the clock and return the step's record, its validation apart."""
        config, train, state = self.config, self.config.train, self.state
        stops, clock, memory, *paces = update.answers
        if self.state.step == self._first_step + 1:  # every rank has come to the update
            set_timeouts(config.launch.timeout_s)
            (memory,) = max_over_ranks(_peak_memory_bytes(self.context.device))  # with the moments that the update made
        self.stopping, self._save_is_due = bool(stops), self._save_is_due or bool(clock)
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
            "peak_memory_bytes": int(memory),
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
        record |= load_summary(stats.expert_counts) | self.saver.record(seconds)
        if config.moe.capacity_factor:
            record["dropped_share"] = stats.dropped_share
        if train.fp8 == "delayed":
            (record["fp8_clipped_share"],) = max_over_ranks(update.fp8_clipped_share)
        return record | self._slow_ranks.record(paces)

    def _asks(self) -> list[float]:
        """What ranks agree on in a step's exchange; of clocks rank 0's counts alone."""
        clock = self.context.rank == 0 and self.saver.minutes_are_up()
        memory = _peak_memory_bytes(self.context.device)
        return [self.context.stop.requested, clock, memory, *self._slow_ranks.own()]

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
            self.saver.poll(wait=True)  # what was saved before all this is not lost with the run
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
        self._resumed = before and self.saver.store.fall_back(self.state, before)
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


class Saver:
    """Writes checkpoints, in the background where that is asked for; every rank calls every method.

    A save that cannot be written (a full disk) is a warning, and training goes on. The last save of a run
    has no later one to make up for it: it is written before the loop leaves, and a failure is an error.

    Args:
        note, warn: take a line for the user.
        saved: takes the folder of every checkpoint that is there in full.
    """

    def __init__(
        self,
        store: CheckpointStore,
        config: Config,
        note: Callable[[str], object],
        warn: Callable[[str], object],
        saved: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        self.store, self.config, self.note, self.warn, self._saved = store, config, note, warn, saved
        self.failures = 0  # saves that could not be written, since this process began
        self._blocked_s = 0.0
        self._began = time.monotonic()  # the newest save, or this process

    def minutes_are_up(self) -> bool:
        """Whether ``checkpoint.every_minutes`` have passed since the last save began, on this rank's clock."""
        minutes = self.config.checkpoint.every_minutes
        return minutes > 0 and time.monotonic() - self._began >= 60 * minutes

    def poll(self, wait: bool = False) -> None:
        """Report a background save that is over; call it once a step.

        Args:
            wait: for one that is not over, as a loop does that leaves without a last save.

        Raises:
            Exception: what ended that save, unless it was a write error.
        """
        if self.store.in_flight:
            with self._blocking():
                self._committed(self.store.poll(wait))

    def save(self, state: TrainState, val_loss: float | None, stopping: bool) -> None:
        """Save ``state``, in the background with ``checkpoint.async_save`` unless the loop leaves after it.

        A save that is still in flight is waited for.

        Raises:
            SaveError: the last checkpoint of the run could not be written, or is not finite.
        """
        self.poll(wait=True)
        self._began = time.monotonic()
        last = stopping or state.step == self.config.train.steps
        with self._blocking(last):
            if self.config.checkpoint.async_save and not last:
                self.store.begin(state, val_loss)
            else:
                self._committed(self.store.save(state, val_loss))

    def record(self, step_seconds: float) -> dict[str, Any]:
        """Keys for a step's metrics: what saving cost the loop since the record before.

        ``checkpoint_seconds`` the loop stood still, ``checkpoint_share`` of the time since then, whether a
        save was in flight during the step, and how many saves have failed. Empty for a run that never saves.
        """
        if not self.config.checkpoint.saves:
            return {}
        blocked, self._blocked_s = self._blocked_s, 0.0
        return {
            "checkpoint_seconds": blocked,
            "checkpoint_share": blocked / max(blocked + step_seconds, 1e-9),
            "checkpoint_in_flight": self.store.in_flight,
            "checkpoint_failures": self.failures,
        }

    def _committed(self, step_dir: Path | None) -> None:
        if step_dir is not None:
            self.note(f"checkpoint {step_dir}")
            self._saved(step_dir)

    @contextmanager
    def _blocking(self, last: bool = False) -> Iterator[None]:
        """Times what the loop waits for; a save that could not be written, but the last, is a warning."""
        started = time.perf_counter()
        try:
            yield
        except SaveError as error:
            if last:
                raise
            self.failures += 1
            self.warn(f"{error}. Training goes on")
        finally:
            self._blocked_s += time.perf_counter() - started


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
