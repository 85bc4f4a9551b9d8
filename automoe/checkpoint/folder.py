"""A folder of checkpoints: ``step-N`` directories, ``LATEST``, which steps stay, and which one a run starts from."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from automoe.checkpoint.agreement import Ranks
from automoe.checkpoint.files import flush, write_durably
from automoe.checkpoint.manifest import MANIFEST, damage, read_manifest
from automoe.config.schema import CheckpointConfig
from automoe.errors import CheckpointError

FOLDER, LATEST = "checkpoints", "LATEST"


def step_number(name: str) -> int:
    """N of ``step-N``."""
    return int(name.removeprefix("step-"))


def committed_steps(folder: Path) -> list[str]:
    """Names of the steps that were renamed into place, oldest first."""
    names = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(names, key=step_number)


def promised_step(folder: Path) -> str | None:
    """What ``LATEST`` names; None where there is no such file."""
    latest = folder / LATEST
    return latest.read_text(errors="replace").strip() if latest.exists() else None


def point_to(folder: Path, name: str) -> None:
    """Make ``LATEST`` name a step, in one go."""
    scratch = folder / f".{LATEST}"
    write_durably(scratch, f"{name}\n")
    os.replace(scratch, folder / LATEST)
    flush(folder)


def clean(folder: Path) -> None:
    """Remove what a killed run left half written or half deleted; the caller holds the run directory's lock."""
    for abandoned in folder.glob(".tmp-*"):
        shutil.rmtree(abandoned) if abandoned.is_dir() else abandoned.unlink()


def commit(temporary: Path, final: Path) -> None:
    """Give a flushed directory its name; from here on it is a checkpoint."""
    flush(temporary)
    temporary.rename(final)
    flush(final.parent)


def remove(step_dir: Path) -> None:
    """Delete a step; one that is half deleted must not be taken for a damaged one."""
    doomed = step_dir.with_name(f".tmp-deleted-{step_dir.name}")
    step_dir.rename(doomed)
    shutil.rmtree(doomed)


def retain(folder: Path, newest: str, checkpoint: CheckpointConfig) -> str | None:
    """Delete the steps that ``checkpoint`` does not keep; returns a warning if it had to leave them.

    Nothing is deleted unless ``newest``, just written, is there with every file in its size: an older
    one may then be the only checkpoint left.
    """
    if (problem := damage(folder / newest, content=False)) is not None:
        return f"checkpoint {folder / newest} is damaged right after it was written ({problem}); none is deleted"
    names = committed_steps(folder)
    losses = {name: read_manifest(folder / name)[0].get("val_loss") for name in names} if checkpoint.keep_best else {}
    validated = {name: loss for name, loss in losses.items() if loss is not None}
    for name in superfluous(names, validated, checkpoint):
        remove(folder / name)
    return None


def superfluous(names: list[str], val_losses: Mapping[str, float], checkpoint: CheckpointConfig) -> list[str]:
    """Steps to delete: not among the newest ``keep``, nor the ``keep_best`` best, nor a multiple of ``keep_every``.

    Args:
        names: committed steps, oldest first; the last one always stays.
        val_losses: validation loss of the steps that were validated; of equal ones the newer is better.
    """
    kept = set(names[-max(checkpoint.keep, 1) :])
    best = sorted(val_losses, key=lambda name: (val_losses[name], -step_number(name)))
    kept |= set(best[: checkpoint.keep_best])
    if checkpoint.keep_every:
        kept |= {name for name in names if step_number(name) % checkpoint.keep_every == 0}
    return [name for name in names if name not in kept]


def source_steps(resume: str, run_dir: Path) -> list[Path]:
    """Steps that ``checkpoint.resume`` names, oldest first: a step directory, or those of a run; none if it is no path.

    Raises:
        CheckpointError: there is no checkpoint at the path, or it is a step of the run itself.
    """
    if resume in ("auto", "never"):
        return []
    path = Path(resume).expanduser()
    if (path / MANIFEST).is_file():
        if path.resolve().parent == run_dir.resolve() / FOLDER:
            raise CheckpointError(
                f"checkpoint.resume={resume} is a step of this run itself, and later ones would be lost. Set another "
                "run_dir to branch off there, or remove the steps after it and set checkpoint.resume=auto"
            )
        return [path]
    for folder in (path / FOLDER, path):
        if names := committed_steps(folder):
            return [folder / name for name in names]
    reason = "has no checkpoint in it" if path.is_dir() else f"is not there (looked from {os.getcwd()})"
    raise CheckpointError(
        f"checkpoint.resume={resume} {reason}. Name a run directory with {FOLDER}/step-N, a step directory, "
        "auto or never"
    )


def check_writable(ranks: Ranks, folder: Path) -> None:
    """Write, flush and remove a file in ``folder`` on every rank, and see rank 0's from all of them.

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
