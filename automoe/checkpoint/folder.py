"""Checkpoint folder: ``step-N`` directories, ``LATEST``, retention, and sources to resume from."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from automoe.checkpoint.manifest import read_manifest, verify_step
from automoe.checkpoint.steps import (
    FOLDER,
    MANIFEST,
    committed_steps,
    is_misnamed,
    misnamed,
    step_number,
)
from automoe.comm.agreement import Ranks
from automoe.config.hub import local_folder
from automoe.config.schema import CheckpointConfig
from automoe.errors import CheckpointError
from automoe.storage.files import (
    explained,
    flush,
    read_file,
    replace_durably,
    set_aside,
    write_durably,
)

LATEST = "LATEST"


def promised_step(folder: Path) -> str | None:
    """Return the name of a checkpoint's folder (``step-N``) in the file ``LATEST``; None without the file.

    Raises:
        CheckpointError: ``LATEST`` is a folder.
    """
    try:
        return read_file(folder / LATEST).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise CheckpointError(
            f"{folder / LATEST} is a folder. Remove it: the newest valid step is then taken"
        ) from None


def point_to(folder: Path, name: str) -> None:
    """Write ``name``, that of a checkpoint's folder, into the file ``LATEST``, atomically."""
    replace_durably(folder / LATEST, f"{name}\n")


def is_saved(step_dir: Path) -> bool:
    """Return True if the checkpoint folder ``step_dir`` exists and holds the step of its name.

    If its intact manifest states another step (a copy under a wrong name), it is renamed to
    ``misnamed-step-N.1``, so that step N can be saved, and the result is False.
    """
    if step_dir.exists() and is_misnamed(step_dir):
        set_aside(step_dir, f"misnamed-{step_dir.name}")
    return step_dir.exists()


def clean(folder: Path) -> None:
    """Remove what a killed run half wrote or half deleted: ``.tmp-*`` in a checkpoint folder.

    The caller holds the run directory's lock.
    """
    for abandoned in folder.glob(".tmp-*"):
        _delete(abandoned)


def remove(step_dir: Path) -> None:
    """Rename a checkpoint's folder, then delete it, so that no checkpoint is ever seen half deleted."""
    doomed = step_dir.with_name(f".tmp-deleted-{step_dir.name}")
    step_dir.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder with its content, a file, or a link.

    The target of a link is kept, because a person put it elsewhere.
    """
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def retain(folder: Path, newest: str, checkpoint: CheckpointConfig) -> str | None:
    """Delete the checkpoints that the settings ``checkpoint`` do not keep.

    Nothing is deleted unless ``newest``, just written, has every file in its full size: otherwise
    an older checkpoint may be the only good one. Nothing is deleted either if ``newest`` was
    written while optimizer steps were being skipped: the cause may be in its weights. A copy of a
    checkpoint under another step's name stays, since a person put it there. So does a checkpoint
    that cannot be read or that another version of automoe wrote.

    Args:
        folder: checkpoint folder of the run.
        newest: folder name of the newest checkpoint.

    Returns:
        A warning if ``newest`` is damaged or cannot be read, else None.
    """
    try:
        manifest, problem = verify_step(folder / newest, Ranks(alone=True), content=False)
    except CheckpointError as error:
        return f"{error}. No checkpoint is deleted"
    if problem is not None:
        return f"checkpoint {folder / newest} is damaged right after it was written ({problem}); nothing is deleted"
    if manifest["counters"]["skipped"]:
        return None
    names = [name for name in committed_steps(folder) if not is_misnamed(folder / name)]
    losses = {}
    for name in names if checkpoint.keep_best else ():
        if (loss := (_manifest(folder / name) or {}).get("val_loss")) is not None:
            losses[name] = loss
    for name in superfluous(names, losses, checkpoint):
        if _manifest(folder / name) is not None:
            remove(folder / name)
    return None


def _manifest(step_dir: Path) -> Mapping[str, Any] | None:
    """Return the manifest of the checkpoint in ``step_dir``; {} if the checkpoint is damaged.

    Returns None if another version wrote the checkpoint, or it cannot be read, for example because
    ``step_dir`` is a broken link.
    """
    try:
        return read_manifest(step_dir)[0]
    except (OSError, CheckpointError):
        return None


def superfluous(
    names: list[str], val_losses: Mapping[str, float], checkpoint: CheckpointConfig
) -> list[str]:
    """Return the names of the checkpoints to delete, by ``keep``, ``keep_best`` and ``keep_every``.

    A checkpoint stays if it is among the newest ``keep`` or the best ``keep_best``, or its step is
    a multiple of ``keep_every``.

    Args:
        names: folder names of the committed steps, oldest first; the last one always stays.
        val_losses: folder name -> validation loss, for each validated step; of equal losses the
            newer step is better.
    """
    staying = set(names[-max(checkpoint.keep, 1) :])
    best = sorted(val_losses, key=lambda name: (val_losses[name], -step_number(name)))
    staying |= set(best[: checkpoint.keep_best])
    if checkpoint.keep_every:
        staying |= {name for name in names if step_number(name) % checkpoint.keep_every == 0}
    return [name for name in names if name not in staying]


def source_steps(resume: str, run_dir: Path) -> list[Path]:
    """Return the checkpoint folders that ``resume`` names, oldest first; [] for auto and never.

    ``resume`` is the setting ``checkpoint.resume``: a step directory, a run directory, auto or
    never. For a run directory all its checkpoints are returned.

    Raises:
        CheckpointError: the path has no checkpoint, or it is a step of the run itself.
    """
    if resume in ("auto", "never"):
        return []
    path = Path(resume).expanduser()
    if (path / MANIFEST).is_file():
        if path.absolute().parent.resolve() == (run_dir / FOLDER).resolve():
            raise CheckpointError(
                f"checkpoint.resume={resume} is a step of this run itself, and later ones would be lost. Set another "
                "run_dir to branch off there, or remove the steps after it and set checkpoint.resume=auto"
            )
        return [path]
    for folder in (path / FOLDER, path):
        if names := committed_steps(folder):
            return [folder / name for name in names]
    reason = f"does not exist (looked from {os.getcwd()})"
    if path.is_dir():
        reason = "has no checkpoint in it"
    raise CheckpointError(
        f"checkpoint.resume={resume} {reason}. Name a run directory with {FOLDER}/step-N, a step directory, "
        "auto or never"
    )


def start_over(folder: Path, begins: Sequence[str | None]) -> None:
    """Rename a run's checkpoints and exports, so that no command takes them for the next start's.

    Args:
        folder: checkpoint folder of the run.
        begins: folders that the next start reads; an export that is one of them stays.
    """
    if folder.exists() and any(folder.iterdir()):
        set_aside(folder, FOLDER)
    read = [local_folder(path).resolve() for path in begins if path is not None]
    for export in (folder.with_name("hf"), folder.with_name("adapter")):
        if export.resolve() not in read:
            set_aside(export, export.name)


def newest_valid(
    folder: Path, ranks: Ranks, warn: Callable[[str], object], of_run: bool
) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint whose files are all intact, and its manifest; None without checkpoints.

    Collective.

    Args:
        folder: checkpoint folder of a run.
        warn: function that gets a warning, a sentence, and prints it.
        of_run: True if the folder is the run's own; damaged newer steps are then renamed, and
            ``LATEST`` is made to name the returned step.

    Raises:
        CheckpointError: no step is intact, ``LATEST`` names a step in a folder without steps, or a
            step cannot be read or was written by another version.
    """
    steps, promised = ranks.lead(lambda: (committed_steps(folder), promised_step(folder)))
    if promised is not None and promised not in steps:
        warn(
            f"{folder / LATEST} names {promised!r}, which does not exist; looking for the newest checkpoint "
            "that does"
        )
    for warning in ranks.lead(lambda: misnamed(folder, steps)):
        warn(warning)
    damaged = []
    for name in reversed(steps):
        manifest, problem = verify_step(folder / name, ranks)
        if problem is None:
            break
        damaged.append(f"{name} ({problem})")
        warn(f"checkpoint {folder / name} is damaged ({problem}); trying the one before it")
    else:
        if damaged or promised is not None:
            listed = "; ".join(damaged) or f"{LATEST} names {promised!r}, which is missing"
            otherwise = "set another checkpoint.resume"
            if of_run:
                otherwise = "start over with checkpoint.resume=never, which sets the folder aside"
            raise CheckpointError(
                f"{folder} holds no checkpoint that can be trusted: {listed}. Restore one from a copy, or {otherwise}"
            )
        return None

    def make_newest() -> list[str]:
        newer = steps[steps.index(name) + 1 :]
        aside = {other: set_aside(folder / other, f"damaged-{other}") for other in newer}
        if promised != name:
            point_to(folder, name)
        return [f"{other} is set aside as {place}" for other, place in aside.items()]

    for warning in ranks.lead(make_newest, again=False) if of_run else ():
        warn(warning)
    return folder / name, manifest


def step_to_resume(
    resume: str, run_dir: Path, ranks: Ranks, warn: Callable[[str], object]
) -> tuple[Path, dict[str, Any], bool] | None:
    """Return the checkpoint that a run resumes from; None if it starts anew. Collective.

    The folder of another run is not changed.

    Args:
        resume: ``checkpoint.resume``: ``auto``, or a path to another run or step, which is used
            only if this run has no steps yet.
        warn: function that prints a warning.

    Returns:
        (step folder, its manifest, True if the step is in this run's own directory).

    Raises:
        CheckpointError: there are steps and none is intact, a step cannot be read or was written by
            another version, or the path of ``resume`` has no step or is a damaged step.
    """
    newest = newest_valid(run_dir / FOLDER, ranks, warn, of_run=True)
    source = Path(resume).expanduser()
    if newest is not None:
        if resume != "auto" and run_dir.resolve() != source.resolve():
            warn(
                f"{run_dir} has its own checkpoints and goes on from {newest[0].name}; "
                f"checkpoint.resume={resume} is only for a run without any"
            )
        return *newest, True
    if resume == "auto":
        return None
    steps = ranks.lead(lambda: source_steps(str(source), run_dir))
    if steps != [source]:
        newest = newest_valid(steps[0].parent, ranks, warn, of_run=False)
        assert newest is not None, "source_steps saw a committed step"
        return *newest, False
    manifest, problem = verify_step(source, ranks)
    if problem is not None:
        raise CheckpointError(
            f"checkpoint.resume={source} is damaged ({problem}). Name another step, or the run directory "
            "to take its newest valid one"
        )
    return source, manifest, False


def check_writable(ranks: Ranks, folder: Path) -> None:
    """Check that all ranks can write to one and the same ``folder``, made if missing. Collective.

    Each rank writes a file, looks for rank 0's, and deletes its own.

    Raises:
        CheckpointError: a rank cannot write to the folder, or sees another directory under its
            name.
    """
    token = ranks.lead(lambda: uuid.uuid4().hex)
    mine = folder / f".tmp-probe-{token}-{ranks.rank}"
    remedy = "Name a run_dir that can be written, or train without saving: checkpoint.every=0"
    with explained(folder, remedy, "cannot be written"):
        ranks.lead(lambda: folder.mkdir(parents=True, exist_ok=True))
        ranks.all(lambda: write_durably(mine, token))
        ranks.lead(lambda: flush(folder))
        seen = all(ranks.all((folder / f".tmp-probe-{token}-0").exists))
        ranks.all(mine.unlink)
    if not seen:
        raise CheckpointError(
            f"{folder} is not the same directory on every rank. Checkpoints need one that all ranks share. "
            f"{remedy}"
        )


def give_up(step: int, temporary: Path, error: OSError) -> str:
    """Delete a failed save's folder; return a message for the user that names the newest step.

    Args:
        step: step of the failed save.
        temporary: folder that the save wrote to.
        error: error that ended the save.
    """
    shutil.rmtree(temporary, ignore_errors=True)
    reason = error.strerror or str(error)
    if error.filename is not None:
        reason += f" ({error.filename})"
    steps = ["an earlier one"]
    with suppress(OSError):  # The disk that failed the save may also fail to list it.
        steps = committed_steps(temporary.parent)
    outcome = f"was not saved: {reason}; "
    outcome += f"{steps[-1]} stays the newest checkpoint" if steps else "there is no checkpoint yet"
    if steps[-1:] == [f"step-{step}"]:
        outcome = f"was written, but LATEST was not or older ones not deleted: {reason}"
    return f"the checkpoint of step {step} {outcome}. Free space or repair the disk"
