"""Choice of the checkpoint that a run starts from: the newest step of a folder that verifies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from automoe.checkpoint import folder as folders
from automoe.checkpoint.manifest import verify_step
from automoe.checkpoint.steps import misnamed
from automoe.comm.agreement import Ranks
from automoe.errors import CheckpointError
from automoe.storage.files import set_aside


def newest_valid(
    folder: Path, ranks: Ranks, warn: Callable[[str], object], of_run: bool
) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest step that verifies and its manifest; None if the folder holds no step.

    Collective.

    Args:
        of_run: True if the folder is the run's own; damaged newer steps are then set aside, so that
            the returned step is the newest.

    Raises:
        CheckpointError: no step verifies, or ``LATEST`` names a step in a folder without steps.
    """
    steps, promised = ranks.lead(
        lambda: (folders.committed_steps(folder), folders.promised_step(folder))
    )
    if promised is not None and promised not in steps:
        warn(
            f"{folder / folders.LATEST} names {promised!r}, which does not exist; looking for the newest checkpoint "
            "that does"
        )
    for warning in ranks.lead(lambda: misnamed(folder, steps)).splitlines():
        warn(warning.removeprefix("warning: "))
    damaged = []
    for name in reversed(steps):
        manifest, problem = verify_step(folder / name, ranks)
        if problem is None:
            break
        damaged.append(f"{name} ({problem})")
        warn(f"checkpoint {folder / name} is damaged ({problem}); trying the one before it")
    else:
        if damaged or promised is not None:
            listed = "; ".join(damaged) or f"{folders.LATEST} names {promised!r}, which is missing"
            raise CheckpointError(
                f"{folder} holds no checkpoint that can be trusted: {listed}. Restore one from a copy, "
                "or start over with checkpoint.resume=never, which sets the folder aside"
            )
        return None

    def make_newest() -> list[str]:
        newer = steps[steps.index(name) + 1 :]
        aside = {other: set_aside(folder / other, f"damaged-{other}") for other in newer}
        if promised != name:
            folders.point_to(folder, name)
        return [f"{other} is set aside as {place}" for other, place in aside.items()]

    for warning in ranks.lead(make_newest, again=False) if of_run else ():
        warn(warning)
    return folder / name, manifest


def step_to_resume(
    resume: str, run_dir: Path, ranks: Ranks, warn: Callable[[str], object]
) -> tuple[Path, dict[str, Any], bool] | None:
    """Return the step that ``checkpoint.resume`` takes, its manifest, and True if it is the run's.

    The folder of another run is not changed.

    Raises:
        CheckpointError: no step verifies, or the path of ``resume`` has none.
    """
    newest = newest_valid(run_dir / folders.FOLDER, ranks, warn, of_run=True)
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
    steps = ranks.lead(lambda: folders.source_steps(str(source), run_dir))
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
