"""``Run``: when to validate, save, stop or return to an earlier checkpoint, and what to record."""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from automoe.checkpoint.store import CheckpointStore, Resumed
from automoe.comm.process_groups import connect_process_groups, set_collective_timeouts
from automoe.config.mesh_shape import MeshShape, exchanges_heads
from automoe.config.schema import Config
from automoe.data.loader import Loader
from automoe.errors import AutomoeError
from automoe.hf.headers import without_collection
from automoe.hf.read import Loaded
from automoe.observe.flops import step_flops_per_token
from automoe.observe.metrics import last_objective, load_summary
from automoe.observe.profiler import profile_steps
from automoe.observe.sample_view import describe_row
from automoe.passes.trace import phase
from automoe.run.hooks import call_hooks, hook_numbers
from automoe.run.record import RunRecord
from automoe.run.samples import Sampler
from automoe.run.slow_ranks import SlowRanks
from automoe.training.context import RunContext
from automoe.training.state import TrainState
from automoe.training.stats import StepStats, max_over_ranks
from automoe.training.step import Update

NAMED_DOCUMENTS = 100  # most documents that the record of a skipped step names


@contextmanager
def open_run(
    config: Config,
    shape: MeshShape,
    context: RunContext,
    state: TrainState,
    store: CheckpointStore,
    resumed: Resumed | None,
) -> Iterator[Run]:
    """Context manager that opens a ``Run``; its record and profile are written even after an error.

    Args:
        resumed: checkpoint that the run resumes from; None: it starts anew.
    """
    run = Run(config, shape, context, state, store, resumed)
    record = run.record
    with ExitStack() as opened:
        if config.launch.gc_every:
            opened.enter_context(without_collection())
        opened.enter_context(profile_steps(config, context.run_dir, context.rank))
        store.attach(record.note, record.warn, lambda folder: call_hooks("run.save", run, folder))
        # Printed here and not in a recipe, which could leave it out.
        record.note_wrapped(cast(Loader, state.loader).describe())
        if context.world_size > 1:
            record.note(connect_process_groups(exchanges_heads(config, shape)))
        opened.push(lambda error, *_: record.close("failed" if error else "done"))
        call_hooks("run.start", run)
        yield run


@dataclass(eq=False)
class Run:
    """Everything around the training steps of a run: decisions, records and reports.

    It decides when to validate, save, stop or return to an earlier checkpoint. Every rank has one
    and calls every method; only rank 0 prints and writes.

    Attributes:
        stopping: True if a rank was requested to stop; all ranks then end the loop after this step.
        objective: newest validation loss, or the newest training loss without validation.
        note: function that prints a line for the user.
        record: printer and writer of the run's reports.
    """

    config: Config
    shape: MeshShape
    context: RunContext
    state: TrainState
    store: CheckpointStore
    resumed: Resumed | None

    def __post_init__(self) -> None:
        config, context, state = self.config, self.context, self.state
        self.record = RunRecord(config, self.shape, context, state.step, self.resumed)
        self.note = self.record.note
        self._slow_ranks = SlowRanks(context, config.launch.probe_every, self.note)
        self._flops = step_flops_per_token(config)
        self._peak_flops = _peak_flops(config, context.device)
        self._began = 0.0
        self._samples: tuple[list[dict[str, str]], float] | None = None
        self._first_step = state.step
        self._save_is_due = False
        self.stopping = False
        self.objective: float | None = None
        if state.step >= config.train.steps:
            self.objective = last_objective(context.run_dir, state.step)
            self.note(
                f"already at step {state.step} of {config.train.steps}: nothing is left to train"
            )
            key = "train.epochs" if config.train.epochs else "train.steps"
            more = config.train.epochs or config.train.steps
            self.note(f"{key}={2 * more:g} continues; checkpoint.resume=never starts over")

    def describe_start(self, loaded: Loaded | None) -> None:
        """Print the model's notes, the source of its weights and, for chat data, a training row.

        Args:
            loaded: result of reading ``model.hf_path``; None if the weights are random.
        """
        loader = self._loader
        for part in self.state.model_parts.values():
            for line in part.notes:
                self.note(line)
        if loaded is not None:
            self.note(str(loaded))
        elif self.config.data.is_chat:
            self.note("from random weights, since model.hf_path is not set")
        if self.context.rank == 0 and loader.corpora[0].trained is not None:
            row = loader.row(0)
            tokens, labels, doc_ids = (
                tensor[0].numpy() for tensor in (row.tokens, row.labels, row.doc_ids)
            )
            self.record.show_row(describe_row(tokens, labels, doc_ids, loader.tokenizer))

    def begin_step(self) -> None:
        """Start timing a step, and report a background save that has ended.

        It also runs Python's garbage collection, at the same steps on all ranks. If each rank
        chose its own moment, all others would wait for it each time.
        """
        self.store.poll()
        every = self.config.launch.gc_every
        if every and self.state.step % every == 0:
            gc.collect(1)  # garbage of a step is in the young generations
        self._slow_ranks.begin_step(self.state.step + 1)
        self._began = time.perf_counter()

    def end_step(self, stats: StepStats, update: Update) -> dict[str, Any]:
        """Stop timing a step and return its record (name -> metric), without validation results.

        Set ``stopping`` and ``objective``, and print a warning if the update was skipped. After
        the run's first step, collectives get the shorter timeout ``launch.timeout_s``.

        Args:
            stats: loss, routing statistics and other sums of the step.
            update: result of ``optimizer_step``; ``update.over_ranks`` holds the maximum over ranks
                of each number that the property ``report`` has.
        """
        config = self.config
        train = self.config.train
        state = self.state
        over_ranks = update.over_ranks
        assert "stop" in over_ranks, (
            "optimizer_step(..., run.report) tells this rank's values to the others"
        )
        if self.state.step == self._first_step + 1:  # all ranks have reached the first update
            set_collective_timeouts(config.launch.timeout_s)
            # The update allocated the optimizer's moments.
            over_ranks = {
                **over_ranks,
                **max_over_ranks({"peak_memory_bytes": _peak_memory_bytes(self.context.device)}),
            }
        self.stopping = bool(over_ranks["stop"])
        self._save_is_due = self._save_is_due or bool(over_ranks["save_due"])
        seconds = time.perf_counter() - self._began
        tokens_per_second = self._loader.rows_of_last_step * train.seq_len / seconds
        if not update.skipped:  # the loss of a skipped step may be NaN
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
            first, last, documents = self._loader.last_batch()
            record |= {
                "skip_reason": update.skip_reason
                or "another rank's loss or gradient is not finite",
                "skipped_rows": [first, last],
                "skipped_documents": documents[:NAMED_DOCUMENTS],
                "num_skipped_documents": len(documents),
            }
            self.record.warn(f"step {state.step} skipped: {_skip_text(record)}")
        if self._peak_flops:
            mfu = self._flops.mfu(tokens_per_second / self.shape.world_size, self._peak_flops)
            record["mfu"], record["mfu_full_attention"] = mfu
        record |= load_summary(stats.expert_counts, config.model.router.num_zero_experts)
        record |= self.store.record(seconds)
        if config.moe.capacity_factor:
            record["dropped_share"] = stats.dropped_share
        if config.optim.qk_clip:
            record["max_attention_logit"] = over_ranks["max_attention_logit"]
        if train.fp8 == "delayed":
            record |= max_over_ranks({"fp8_clipped_share": update.fp8_clipped_share})
        return record | self._slow_ranks.record(over_ranks)

    @property
    def _loader(self) -> Loader:
        return cast(Loader, self.state.loader)

    @property
    def report(self) -> dict[str, float]:
        """This rank's numbers by name, of which ``optimizer_step`` takes the maximum over ranks.

        They are ``stop`` (1: this rank received a stop request), ``save_due`` (1: rank 0, after
        ``checkpoint.every_minutes``), ``peak_memory_bytes`` and ``probe_seconds.RANK`` (time of a
        matrix product in steps that measure it).
        """
        save_due = self.context.rank == 0 and self.store.minutes_are_up()
        return {
            "stop": self.context.stop.requested,
            "save_due": save_due,
            "peak_memory_bytes": _peak_memory_bytes(self.context.device),
            **self._slow_ranks.report(),
        }

    def validates(self) -> bool:
        """Return True if the model should be validated after the step just taken.

        This is so every ``train.val_every`` steps, after the last step, and before a requested
        stop; never if ``train.val_every`` is 0.
        """
        train = self.config.train
        step = self.state.step
        return bool(train.val_every) and (
            step % train.val_every == 0 or step == train.steps or self.stopping
        )

    def sample(self, sampler: Sampler) -> None:
        """Generate answers to ``observe.samples`` and show them with the step's record. Collective."""
        if sampler.texts:
            began = time.perf_counter()
            self.show_samples(sampler.generate(), time.perf_counter() - began)

    def show_samples(self, samples: list[dict[str, str]], seconds: float) -> None:
        """Keep generated answers, to be printed and written with the step's record.

        Args:
            samples: ``prompt`` and ``text`` of each answer.
            seconds: time that generating them took.
        """
        self._samples = samples, seconds

    def saves(self) -> bool:
        """Return True if the state should be saved now; a due save is then no longer due.

        A save is due every ``checkpoint.every`` steps, after ``checkpoint.every_minutes``, after
        the last step, and when the run was asked to stop. If the step's update was skipped, a
        periodic save waits for the next step with an update; one at the end or at a stop does not.
        Nothing is saved before the first update since the start or the last load of a checkpoint,
        or if ``checkpoint.saves`` is False.
        """
        state = self.state
        checkpoint = self.config.checkpoint
        if not checkpoint.saves:
            return False
        # a step that a fall-back returned to was saved before
        if checkpoint.every > 0 and state.step > self._first_step:
            self._save_is_due |= state.step % checkpoint.every == 0
        if not self._took_a_step():
            return False
        last = state.step >= self.config.train.steps or self.stopping
        due = last or (self._save_is_due and not state.skipped)
        self._save_is_due &= not due
        return due

    def write_or_go_back(self, record: Mapping[str, Any], stats: StepStats) -> None:
        """Print and write a step's record; load an earlier checkpoint if no update has succeeded since the resume.

        The record gets the numbers of plugins. If the updates of all steps since the resume were
        skipped, and these are ``train.max_skipped`` steps or all that remain of the run, the
        checkpoint before the resumed one is loaded; ``state.step`` is then smaller than before.

        Raises:
            AutomoeError: ``train.max_skipped`` steps in a row were skipped, and an earlier one was not;
                or none since the start or resume had an update, and no earlier checkpoint exists.
        """
        with phase("record", self.state.step):
            self.objective = record.get("val_loss", self.objective)
            self.record.show_step(record)
            record = {**record, **hook_numbers(self, record)}
            self.record.write_step(record, stats.expert_counts)
            if self._samples is not None:
                self.record.write_samples(self.state.step, *self._samples)
                self._samples = None
        state = self.state
        train = self.config.train
        over = state.skipped >= train.max_skipped
        if over or (state.step >= train.steps and not self._took_a_step()):
            self.store.poll(wait=True)  # let a background save finish before the run may end
            if not self._took_a_step() and self._fall_back():
                return
            optim = self.config.optim
            reason = (
                "in a row were skipped (train.max_skipped)"
                if over
                else "were skipped, and none was taken"
            )
            gave_up = f". Checkpoints given up before: {'; '.join(self.context.fell_back)}"
            raise AutomoeError(
                f"{min(state.skipped, state.step)} steps {reason}, the last step "
                f"{state.step}: {_skip_text(record)}. metrics.jsonl names the rows and documents of each. Lower "
                f"optim.lr ({optim.lr}), raise optim.warmup_steps ({optim.warmup_steps}), or look at that data"
                f"{gave_up if self.context.fell_back else ''}"
            )

    write = write_or_go_back  # its name in recipes that were copied before version 0.17

    def _took_a_step(self) -> bool:
        """Return True if any step since the start or the last checkpoint load was not skipped."""
        return self.state.step - self._first_step > self.state.skipped

    def _fall_back(self) -> bool:
        """Load the checkpoint before the one that the run resumed; return False if there is none."""
        before = self.resumed
        earlier = self.state.step
        self.resumed = before and self.store.fall_back(self.state, before)
        if before is None or self.resumed is None:
            return False
        self._first_step = self.state.step
        self._save_is_due = False
        self.context.fell_back.append(
            f"no step from {before.step + 1} to {earlier} could be taken, went back to step {self.state.step}"
        )
        self.record.warn(
            f"{self.context.fell_back[-1]}. Lower optim.lr if the run ends the same way again"
        )
        self.record.rewind(self.state.step)
        return True

    def check_result(self) -> None:
        """Raise if nothing was trained, and prepare the process groups for the export.

        Collectives get the long timeout ``launch.init_timeout_s``.

        Raises:
            AutomoeError: after the last step, the last validation or training loss is not finite, or no
                token of any step had a label.
        """
        set_collective_timeouts(self.config.launch.init_timeout_s)
        if self.state.step >= self.config.train.steps and not math.isfinite(self.objective or 0.0):
            raise AutomoeError(
                f"the run reached step {self.state.step}, but its last loss is {self.objective}: no result. Lower "
                f"optim.lr ({self.config.optim.lr}), or look at the last records in metrics.jsonl"
            )
        if self.state.step >= self.config.train.steps and not self.state.tokens:
            raise AutomoeError(
                f"the run reached step {self.state.step}, and no token had a label: nothing was trained. Documents of "
                "one token have none; see whether data.tokenizer fits the text of data.path"
            )

    def finish(self, paths: Mapping[str, str | Path]) -> None:
        """Call the plugin functions of ``run.finish``, close the record and print the run's summary.

        Args:
            paths: name -> path of each result, to print in the summary.
        """
        call_hooks("run.finish", self)
        self.record.finish("preempted" if self.context.preempted else "done", paths)


def _skip_text(record: Mapping[str, Any]) -> str:
    """Return text that says why the step of ``record`` was skipped, with its batch's rows and documents."""
    (first, last), names = record["skipped_rows"], record["skipped_documents"]
    more = record["num_skipped_documents"] - 3
    listed = ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
    return f"{record['skip_reason']}; rows {first}-{last} of the training data, from {listed}"


def _peak_flops(config: Config, device: torch.device) -> float | None:
    """Return the device's dense bf16 FLOP/s, as configured or known by GPU name; None if unknown."""
    if config.cluster.peak_flops:
        return config.cluster.peak_flops
    if device.type != "cuda":
        return None
    from automoe.observe.peak_flops import peak_flops

    return peak_flops(torch.cuda.get_device_name(device))


def _peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on CUDA, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
