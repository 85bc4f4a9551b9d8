"""Where a run starts from, and whether it can save: what is found out before weights are loaded."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from automoe.checkpoint.agreement import Ranks
from automoe.checkpoint.files import flush, write_durably
from automoe.checkpoint.folder import FOLDER, step_or_folder
from automoe.errors import CheckpointError


def named_source(resume: str) -> Path:
    """The path of ``checkpoint.resume=PATH``."""
    return Path(resume).expanduser()


def check_source(resume: str, run_dir: Path) -> tuple[Path | None, Path | None]:
    """The step directory, or else the folder of steps, that ``checkpoint.resume`` names; (None, None): no path.

    Raises:
        CheckpointError: there is no checkpoint at the path, or it is a step of the run itself.
    """
    if resume in ("auto", "never"):
        return None, None
    path = named_source(resume)
    step_dir, folder = step_or_folder(path)
    if step_dir is not None and path.resolve().parent == run_dir.resolve() / FOLDER:
        raise CheckpointError(
            f"checkpoint.resume={resume} is a step of this run itself, and later ones would be lost. Set another "
            "run_dir to branch off there, or remove the steps after it and set checkpoint.resume=auto"
        )
    if step_dir is None and folder is None:
        reason = "has no checkpoint in it" if path.is_dir() else f"is not there (looked from {os.getcwd()})"
        raise CheckpointError(
            f"checkpoint.resume={resume} {reason}. Name a run directory with {FOLDER}/step-N, a step directory, "
            "auto or never"
        )
    return step_dir, folder


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
