"""Training state on disk: written under a temporary name, renamed to commit, verified on load.

torch.distributed.checkpoint moves the tensors (and reshards them on load); it is not a commit
protocol. So all ranks write a step to ``.tmp-step-N``, and each flushes and hashes its own files. A
manifest lists the files with sizes and digests. The folder is renamed to ``step-N``, and only then
does ``LATEST`` name it. An existing step is never written into.

The rename commits, and a run resumes from the newest step that verifies. ``LATEST`` names the step
that should be the newest, so a lost or damaged newest step is noticed and not silently replaced by
an older one.
"""

from __future__ import annotations

import math
import shutil
import time
import uuid
from collections import ChainMap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from automoe.checkpoint import folder as folders
from automoe.checkpoint.generators import of_this_rank, rng_state, set_rng_state
from automoe.checkpoint.hashed_files import HashingFileSystem
from automoe.checkpoint.manifest import changed_settings, check_base, check_model, write_manifest
from automoe.checkpoint.planner import CachedPlanner
from automoe.checkpoint.reader import StepReader, dcp_error
from automoe.checkpoint.saved_state import (
    begin_averages,
    counters_of,
    fill_copies,
    load_counters,
    not_finite,
    optional_names,
    tensors_of,
)
from automoe.comm.agreement import Ranks
from automoe.config.convert import config_to_dict
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import CheckpointError, SaveError, listed, retried
from automoe.hf.identity import checkpoint_identity
from automoe.interop.torch_private import forget_cached_plans, state_dict_stager
from automoe.passes.trace import phase
from automoe.storage.files import explained, flush, set_aside
from automoe.storage.folder import name_folder

if TYPE_CHECKING:
    from automoe.data.loader import Loader
    from automoe.training.state import TrainState

_LEAST_TIMEOUT_S = 1800  # another rank may have many gigabytes to write or to check


@dataclass(frozen=True)
class Resumed:
    """Position from which a run continues, returned by ``CheckpointStore.load_latest``.

    Attributes:
        step: optimizer steps done.
        of_run: True if the checkpoint is in the run's own directory, whose metrics are continued.
        folder: name of the checkpoint's folder, which differs from step-{step} if a person renamed it.
    """

    step: int
    of_run: bool
    folder: str


class CheckpointStore:
    """Checkpoints of one run directory; every rank makes a store and calls every method.

    Args:
        config: the run's configuration; ``config.checkpoint`` says which steps to keep.
        shape: sizes of the axes of the mesh of these ranks.
        run_dir: directory that all ranks see; checkpoints are in ``run_dir/checkpoints``.
    """

    def __init__(self, config: Config, shape: MeshShape, run_dir: Path) -> None:
        self.config = config
        self.shape = shape
        self.run_dir = run_dir
        self.folder = run_dir / folders.FOLDER
        self.ranks = Ranks(max(config.launch.timeout_s, _LEAST_TIMEOUT_S))
        self.facts: dict[str, Any] = {}  # further counters to save, for a recipe to compare
        self._found: tuple[Path, dict[str, Any], bool] | None = None
        self._plans = uuid.uuid4().hex
        self._stager: Any = None
        self._in_flight: Future[Path] | None = None
        self.failures = 0  # saves that could not be written, since this process began
        self._blocked_s = 0.0
        self.attach(self._say, self._warn, lambda step_dir: None)

    def check(self, loader: Loader | None = None) -> None:
        """Check, before weights are loaded, that saves and a resume with ``loader`` will work. Collective.

        Without a loader, only saves and the path ``checkpoint.resume`` are checked.

        Raises:
            CheckpointError: the folder differs between ranks, or a rank cannot write to it; torch
                lacks the stager of ``async_save``; or the step to resume is damaged or of another model.
            DataError: the data changed since that step.
        """
        if self.config.checkpoint.saves:
            if self.config.checkpoint.async_save:
                _new_stager(pin_memory=False)
            folders.check_writable(self.ranks, self.folder)
            _ = self.base  # Computed now, while the files are the ones to load.
        self.ranks.lead(lambda: folders.source_steps(self.config.checkpoint.resume, self.run_dir))
        if loader is not None and (newest := self.newest()) is not None:
            loader.check_state(newest[1]["counters"]["loader"])

    # ---------------------------------------------------------------- saving

    def attach(
        self,
        note: Callable[[str], object],
        warn: Callable[[str], object],
        saved: Callable[[Path], object],
    ) -> None:
        """Register a run's callbacks, and start the clock of ``checkpoint.every_minutes``.

        Args:
            note: function that shows the user a message.
            warn: function that shows the user a warning.
            saved: function that is called with the folder of every committed checkpoint.
        """
        self._note = note
        self._warn_user = warn
        self._saved = saved
        self._began = time.monotonic()

    def minutes_are_up(self) -> bool:
        """Return True if ``checkpoint.every_minutes`` have passed since the last save began; False if the key is 0.

        Each rank answers by its own clock.
        """
        minutes = self.config.checkpoint.every_minutes
        return minutes > 0 and time.monotonic() - self._began >= 60 * minutes

    def save(
        self, state: TrainState, val_loss: float | None = None, stopping: bool = False
    ) -> Path | None:
        """Save ``state``; in the background with ``checkpoint.async_save`` unless ``stopping``.

        A checkpoint is committed in full or not at all, and an existing step is left as it is. The method waits for a
        save in flight. If a write fails (a full disk) or a tensor is not finite, the user is warned and training
        continues; in the last save of a run it is an error, because no later save can replace it.

        Args:
            val_loss: the state's validation loss, for ``checkpoint.keep_best``.
            stopping: True if the loop leaves after this save, as it does after the last step.

        Returns:
            The directory of the checkpoint; None if the save continues in the background, or
            failed.

        Raises:
            SaveError, on every rank: the last checkpoint of the run could not be written, or is not finite.
        """
        self.poll(wait=True)
        self._began = time.monotonic()
        last = stopping or state.step == self.config.train.steps
        with self._blocking(last):
            # A save would replace older steps, so one of numbers that are not finite is refused.
            with phase("check_finite", state.step):
                by_rank = self.ranks.all(lambda: not_finite(state))
            if bad := [
                f"{name} on rank {rank}" for rank, names in enumerate(by_rank) for name in names
            ]:
                raise SaveError(
                    f"the checkpoint of step {state.step} was not saved: its numbers are not finite "
                    f"({listed(bad)}). Older checkpoints stay. Lower optim.lr, or raise optim.warmup_steps"
                )
            tensors = tensors_of(state, frozen=self.base is None) | of_this_rank(rng_state())
            content = {
                "step": state.step,
                "counters": counters_of(state) | self.facts,
                "config": config_to_dict(self.config),
                # The generators' states mean nothing on another mesh.
                "generators": {"mesh": self._mesh_sizes(), "names": sorted(rng_state())},
                "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
            } | ({"base": self.base} if self.base else {})
            if not self.config.checkpoint.async_save or last:
                return self._committed(self._write(tensors, content))
            # Copied to CPU buffers, which later saves reuse, and written in the background.
            on_cuda = any(tensor.is_cuda for tensor in tensors.values())
            if self._stager is None:
                self._stager = _new_stager(pin_memory=on_cuda)
            staged = self._stager.stage(tensors, non_blocking=on_cuda)
            if on_cuda:
                torch.cuda.synchronize()  # until the copies are complete
            # A new thread is on the node's first GPU, and torch's writer synchronises with the GPU of
            # its thread: every rank would open a CUDA context on the first GPU.
            here = (torch.cuda.set_device, (torch.cuda.current_device(),)) if on_cuda else ()
            executor = ThreadPoolExecutor(1, "save", *here)
            self._in_flight = executor.submit(self._write, staged, content)
            executor.shutdown(wait=False)
        return None

    def poll(self, wait: bool = False) -> Path | None:
        """Return the folder of a background save that is now complete, else None; call this every step. Collective.

        Args:
            wait: True to wait until the save has ended, for a loop that ends without a last save.

        Returns:
            None while a rank is writing, without a save, or if files could not be written (a warning, no error).

        Raises:
            Exception: any other error that ended the save, in the same call on every rank.
        """
        if self._in_flight is None:
            return None
        with self._blocking():
            if not wait:
                # All ranks decide together: a rank that went ahead would leave the others in a
                # poll.
                done = torch.tensor([int(self._in_flight.done())], dtype=torch.int32)
                if self.ranks.size > 1:
                    # The save in flight uses another group.
                    dist.all_reduce(done, op=dist.ReduceOp.MIN)
                if not done.item():
                    return None
            over = self._in_flight
            self._in_flight = None
            return self._committed(over.result())
        return None

    @property
    def in_flight(self) -> bool:
        """True from the start of a background save until ``poll`` has reported its end."""
        return self._in_flight is not None

    def record(self, step_seconds: float) -> dict[str, Any]:
        """Return a step's metrics on the cost of saving; {} for a run that never saves.

        ``checkpoint_seconds`` is the time that the loop has waited since the previous call, ``checkpoint_share`` its
        share of that time plus ``step_seconds``, ``checkpoint_in_flight`` whether a save is in flight, and
        ``checkpoint_failures`` the number of failed saves of this process.
        """
        if not self.config.checkpoint.saves:
            return {}
        blocked = self._blocked_s
        self._blocked_s = 0.0
        return {
            "checkpoint_seconds": blocked,
            "checkpoint_share": blocked / max(blocked + step_seconds, 1e-9),
            "checkpoint_in_flight": self.in_flight,
            "checkpoint_failures": self.failures,
        }

    def _committed(self, step_dir: Path) -> Path:
        self._note(f"checkpoint {step_dir}")
        self._saved(step_dir)
        return step_dir

    @contextmanager
    def _blocking(self, last: bool = False) -> Iterator[None]:
        """Count the ``with`` block's time as waiting; a ``SaveError`` becomes a warning, or is raised if ``last``."""
        started = time.perf_counter()
        try:
            yield
        except SaveError as error:
            if last:
                raise
            self.failures += 1
            self._warn_user(f"{error}. Training goes on")
        finally:
            self._blocked_s += time.perf_counter() - started

    @cached_property
    def base(self) -> str | None:
        """Digest of the checkpoint at ``model.hf_path`` if weights are frozen, else None. Collective.

        Saved steps leave out the frozen weights, which that checkpoint holds. With ``model.upcycle`` it is None, too.
        """
        config = self.config
        model = config.model
        begun = model.hf_path is not None and not model.random_weights
        if not begun or model.upcycle or not (config.lora.rank or config.train.freeze):
            return None
        return self.first_weights

    @cached_property
    def first_weights(self) -> str:
        """Digest of the checkpoint that the run starts from, or ``random:SEED``. Collective."""
        hf_path = self.config.model.hf_path
        if hf_path is None or self.config.model.random_weights:
            return f"random:{self.config.train.seed}"
        return checkpoint_identity(hf_path, self.ranks)

    def _mesh_sizes(self) -> list[list[int]]:
        return [list(self.shape.sizes(view)) for view in ("default", "moe")]

    def _write(self, tensors: dict[str, torch.Tensor], content: dict[str, Any]) -> Path:
        """Write the files, commit the step, replace ``LATEST`` and delete old steps. Collective.

        If a rank fails in one of these stages, no rank begins the next. ``content`` is the manifest's. Returns the
        step's folder, which is left as it is if it exists. Raises ``SaveError`` if a file cannot be written.
        """
        step = content["step"]
        final = self.folder / f"step-{step}"
        temporary = self.folder / f".tmp-step-{step}"
        checkpoint = self.config.checkpoint

        def prepare() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        def write_files() -> None:
            self.ranks.lead(prepare, again=False)
            # This file system flushes and hashes the files of the rank.
            writer = dcp.FileSystemWriter(temporary, sync_files=False)
            writer.fs = files = HashingFileSystem(step)
            planner = CachedPlanner(self._plans)
            try:
                dcp.save(
                    tensors, storage_writer=writer, planner=planner, process_group=self.ranks.group
                )
            except CheckpointException as error:
                forget_cached_plans(
                    self._plans
                )  # some ranks may have cached a plan that others lack
                raise dcp_error(error) from None
            facts = self.ranks.all(lambda: files.facts)

            def finish() -> None:
                write_manifest(temporary, content, ChainMap(*facts))
                flush(temporary)

            with phase("write_manifest", step):
                self.ranks.lead(finish, again=False)

        try:
            with phase("save", step):
                if self.ranks.lead(lambda: folders.is_saved(final), again=False):
                    return final
                # A retry writes everything again: after a failed flush, a second flush can succeed
                # although the data is lost.
                retried(write_files)
                with phase("commit", step):
                    self.ranks.lead(lambda: name_folder(temporary, final), again=False)
                with phase("write_latest", step):
                    self.ranks.lead(lambda: folders.point_to(self.folder, final.name))
                self._warn(
                    self.ranks.lead(lambda: folders.retain(self.folder, final.name, checkpoint))
                )
        except OSError as error:
            failed = error
            said = self.ranks.lead(lambda: folders.give_up(step, temporary, failed))
            raise SaveError(said) from error
        return final

    # ---------------------------------------------------------------- resuming

    def load_latest(self, state: TrainState) -> Resumed | None:
        """Fill ``state`` from the newest intact checkpoint; any mesh may have written it. Collective.

        Checkpoints in the run's own directory come first, whatever ``checkpoint.resume`` says. With
        ``checkpoint.resume=never`` they are set aside as ``checkpoints.1`` and so on, like the exports ``hf`` and
        ``adapter`` (unless the run begins with them), and the result is None, as without a checkpoint. A path applies
        to a run without checkpoints: a run directory, whose newest valid step is taken, or a step directory.

        A warning names damaged checkpoints newer than the loaded one; in the run's own directory they are set aside as
        ``damaged-step-N.1``. Another warning names changed settings that affect the run's numbers.

        Raises:
            CheckpointError: another model wrote the checkpoint (the message lists the fields that differ), no
                checkpoint verifies, or the disk cannot be read.
            DataError: the data changed since the checkpoint.
        """
        with self._readable():
            if self.config.checkpoint.resume == "never":
                config = self.config
                begins = [config.model.hf_path, config.lora.path, config.data.tokenizer]
                begins.append(getattr(config.recipe_args, "teacher", None))
                self.ranks.lead(lambda: folders.start_over(self.folder, begins), again=False)
                return None
            if (newest := self.newest()) is None:
                return None
            self.forget_newest()
            step_dir, manifest, of_run = newest
            with phase("load", manifest["step"]):
                then, now = changed_settings(manifest["config"], self.config)
                if then:
                    self._warn(
                        f"{step_dir} was trained with {', '.join(then)}; it goes on with {', '.join(now)}"
                    )
                load_counters(
                    state, manifest["counters"]
                )  # First, because it raises if the data changed.
                saved = manifest["generators"]
                here = rng_state() if saved["mesh"] == self._mesh_sizes() else {}
                generators = {name: here[name] for name in saved["names"] if name in here}
                reader = StepReader(step_dir)
                absent = optional_names(state) - reader.read_metadata().state_dict_metadata.keys()
                tensors = tensors_of(state, frozen=self.base is None)
                for name in absent & tensors.keys():
                    del tensors[name]
                reader.load(tensors | of_this_rank(generators), process_group=self.ranks.group)
                fill_copies(state)
                if begin_averages(state, absent):
                    self._warn(
                        f"{step_dir} has no averages of weights (optim.ema_decay): they begin with its weights"
                    )
                set_rng_state(generators)
            return Resumed(state.step, of_run, step_dir.name)

    def newest(self) -> tuple[Path, dict[str, Any], bool] | None:
        """Return the step to resume: (folder, manifest, True if in this run's directory), or None.

        The step is searched for and verified once; later calls return the same one. The search removes half-written
        folders of this run and renames damaged newer steps. Collective.

        Raises:
            CheckpointError: no step is intact, or it has another model, optimizer, or frozen or reference weights.
        """
        self.poll(wait=True)  # a save in the background has a folder to be, and uses ``ranks``
        resume = self.config.checkpoint.resume
        if self._found is None and resume != "never":
            with self._readable():
                self.ranks.lead(lambda: folders.clean(self.folder))
                self._found = folders.step_to_resume(resume, self.run_dir, self.ranks, self._warn)
            if self._found is not None:
                step_dir, manifest, _ = self._found
                check_model(step_dir, manifest["config"], self.config)
                check_base(step_dir, manifest, self.config, self.base)
        return self._found

    def _readable(self) -> AbstractContextManager[None]:
        """Return a context that turns an ``OSError`` into a ``CheckpointError`` naming the folder."""
        remedy = "Its content is left as it is. Check the disk, or its permissions"
        return explained(self.folder, remedy, "cannot be used")

    def forget_newest(self) -> None:
        """Make the next call of ``newest`` look at the folder again."""
        self._found = None

    def fall_back(self, state: TrainState, resumed: Resumed) -> Resumed | None:
        """Rename the ``resumed`` step, so that no run uses it, and load the step before it. Collective.

        Returns:
            Position of the loaded step; None, with nothing changed, if no earlier step exists or
            the ``resumed`` one belongs to another run.

        Raises:
            CheckpointError: no earlier step verifies, or the disk cannot be read.
        """
        with self._readable():
            steps = self.ranks.lead(lambda: folders.committed_steps(self.folder))
        name = resumed.folder
        if not resumed.of_run or name not in steps[1:]:
            return None

        def exclude() -> str | None:
            folders.point_to(self.folder, steps[steps.index(name) - 1])
            return set_aside(self.folder / name, f"diverged-{name}")

        with self._readable():
            aside = self.ranks.lead(exclude, again=False)
        self._warn(
            f"no step after {name} could be taken: it is set aside as {aside}, and the one before it is loaded"
        )
        return self.load_latest(state)

    def _warn(self, text: str | None) -> None:
        if text is not None:
            self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)


def _new_stager(pin_memory: bool) -> Any:
    """Return torch's ``StateDictStager``, which copies to CPU memory (pinned if ``pin_memory``).

    Raises ``CheckpointError`` if torch has none. torch 2.11's ``DefaultStager`` serves only one save.
    """
    try:
        return state_dict_stager(pin_memory)
    except (ImportError, TypeError) as error:  # it is private to torch
        raise CheckpointError(
            "checkpoint.async_save=true copies the state with torch's StateDictStager, which torch "
            f"{torch.__version__} does not have in its form of 2.11 to 2.15: {error}. Set "
            "checkpoint.async_save=false, or install one of those"
        ) from None
