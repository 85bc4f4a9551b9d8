"""A folder of checkpoints: ``step-N`` directories, ``LATEST``, which steps stay, and which one a
run starts from."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automoe.checkpoint.manifest import MANIFEST, read_manifest, verify_step
from automoe.config.schema import CheckpointConfig
from automoe.errors import CheckpointError
from automoe.parallel.agreement import Ranks
from automoe.storage.files import flush, replace_durably, write_durably

FOLDER, LATEST = "checkpoints", "LATEST"
_UNREADABLE: Mapping[str, Any] = {}  # known by its identity


def step_number(name: str) -> int:
    """N of ``step-N``."""
    return int(name.removeprefix("step-"))


def committed_steps(folder: Path) -> list[str]:
    """Names of the steps that were renamed into place, oldest first; a link to a step is one.

    Raises:
        OSError: the folder cannot be read, which does not mean that it is empty.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((name for name in names if re.fullmatch(r"step-\d+", name)), key=step_number)


def promised_step(folder: Path) -> str | None:
    """What ``LATEST`` names; None where there is no such file."""
    try:
        return (folder / LATEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise CheckpointError(
            f"{folder / LATEST} is a folder. Remove it: the newest valid step is taken"
        ) from None


def point_to(folder: Path, name: str) -> None:
    """Make ``LATEST`` name a step, in one go."""
    replace_durably(folder / LATEST, f"{name}\n")


def clean(folder: Path) -> None:
    """Remove what a killed run left half written or half deleted; the caller holds the run
    directory's lock."""
    for abandoned in folder.glob(".tmp-*"):
        _delete(abandoned)


def remove(step_dir: Path) -> None:
    """Delete a step; one that is half deleted must not be taken for a damaged one."""
    doomed = step_dir.with_name(f".tmp-deleted-{step_dir.name}")
    step_dir.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """A folder with all that is in it, a file, or a link: what a link leads to was put elsewhere by
    a person."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def retain(folder: Path, newest: str, checkpoint: CheckpointConfig) -> str | None:
    """Delete the steps that ``checkpoint`` does not keep; returns a warning if it had to leave
    them.

    Nothing is deleted unless ``newest``, just written, is there with every file in its size: an
    older one may then be the only checkpoint left. Nor is anything if it was written in a streak of
    skipped steps: what led to them may be in it.
    """
    try:
        manifest, problem = verify_step(folder / newest, Ranks(alone=True), content=False)
    except CheckpointError as error:
        return f"{error}. No checkpoint is deleted"
    if problem is not None:
        return f"checkpoint {folder / newest} is damaged right after it was written ({problem}); none is deleted"
    if manifest["counters"]["skipped"]:
        return None
    names = committed_steps(folder)
    losses = (
        {name: _readable(folder / name).get("val_loss") for name in names}
        if checkpoint.keep_best
        else {}
    )
    validated = {name: loss for name, loss in losses.items() if loss is not None}
    for name in superfluous(names, validated, checkpoint):
        if _readable(folder / name) is not _UNREADABLE:
            remove(folder / name)
    return None


def _readable(step_dir: Path) -> Mapping[str, Any]:
    """A step's manifest, empty where it is damaged; ``_UNREADABLE`` of one that another version
    wrote or is away."""
    try:
        return read_manifest(step_dir)[0]
    except (OSError, CheckpointError):
        return _UNREADABLE


def superfluous(
    names: list[str], val_losses: Mapping[str, float], checkpoint: CheckpointConfig
) -> list[str]:
    """Steps to delete: not among the newest ``keep``, nor the ``keep_best`` best, nor a multiple of
    ``keep_every``.

    Args:
        names: committed steps, oldest first; the last one always stays.
        val_losses: validation loss of the steps that were validated; of equal ones the newer is
            better.
    """
    kept = set(names[-max(checkpoint.keep, 1) :])
    best = sorted(val_losses, key=lambda name: (val_losses[name], -step_number(name)))
    kept |= set(best[: checkpoint.keep_best])
    if checkpoint.keep_every:
        kept |= {name for name in names if step_number(name) % checkpoint.keep_every == 0}
    return [name for name in names if name not in kept]


def source_steps(resume: str, run_dir: Path) -> list[Path]:
    """Steps that ``checkpoint.resume`` names, oldest first: a step directory, or those of a run;
    none if it is no path.

    Raises:
        CheckpointError: there is no checkpoint at the path, or it is a step of the run itself.
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
    reason = (
        "has no checkpoint in it" if path.is_dir() else f"is not there (looked from {os.getcwd()})"
    )
    raise CheckpointError(
        f"checkpoint.resume={resume} {reason}. Name a run directory with {FOLDER}/step-N, a step directory, "
        "auto or never"
    )


def check_writable(ranks: Ranks, folder: Path) -> None:
    """Write, flush and remove a file in ``folder`` on every rank, and see rank 0's from all of
    them.

    Raises:
        CheckpointError: a rank cannot write there, or sees another directory under that name.
    """
    token = ranks.lead(lambda: uuid.uuid4().hex)
    mine = folder / f".tmp-probe-{token}-{ranks.rank}"
    remedy = "Name a run_dir that can be written, or train without saving: checkpoint.every=0"
    try:
        ranks.lead(lambda: folder.mkdir(parents=True, exist_ok=True))
        ranks.all(lambda: write_durably(mine, token))
        ranks.lead(lambda: flush(folder))
        seen = all(ranks.all((folder / f".tmp-probe-{token}-0").exists))
        ranks.all(mine.unlink)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}. {remedy}") from None
    if not seen:
        raise CheckpointError(
            f"{folder} is another directory on some rank than on rank 0. Checkpoints need one that all ranks share. "
            f"{remedy}"
        )


def give_up(temporary: Path, folder: Path) -> str | None:
    """Free the space of a save that failed; returns the newest step that is there."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        steps = committed_steps(folder)
    except OSError:  # the disk that failed the save may not even list what it has
        return "what was there before"
    return steps[-1] if steps else None
