"""Training state on disk: written beside, renamed into place, verified before it is believed.

torch.distributed.checkpoint moves the tensors (and reshards them on load); it is not a commit protocol.
So a step is written to ``.tmp-step-N``, listed in a manifest with sizes and SHA-256, flushed, renamed to
``step-N``, and only then named by ``LATEST``. An existing step is never written into.

The rename commits: the newest step that verifies is the one to resume from. ``LATEST`` says which one
that ought to be, so a newest step that is lost or damaged is noticed and not quietly replaced by an
older one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from automoe.checkpoint.state import TrainState
from automoe.config.schema import Config
from automoe.errors import CheckpointError

MANIFEST, LATEST = "manifest.json", "LATEST"

T = TypeVar("T")


class CheckpointStore:
    """The checkpoints of one run directory; every rank calls every method.

    Args:
        config: its model must be the checkpoint's; ``checkpoint.keep`` newest steps are kept.
        run_dir: a directory that all ranks see; checkpoints live in ``run_dir/checkpoints``.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config = config
        self.folder = run_dir / "checkpoints"

    def save(self, state: TrainState) -> Path:
        """Write ``state`` and return its directory; it is there in full or not at all.

        A step that is there already is left as it is.

        Raises:
            OSError: it cannot be written; on every rank alike if rank 0 meets it.
        """
        final = self.folder / f"step-{state.step}"
        temporary = self.folder / f".tmp-step-{state.step}"

        def prepare() -> bool:
            if final.exists():
                return False
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            return True

        if not _on_rank_0(prepare):
            return final
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
            dcp.save(state.tensors(), checkpoint_id=temporary)
        _on_rank_0(lambda: self._commit(temporary, final, state))
        return final

    def load_latest(self, state: TrainState) -> bool:
        """Fill ``state`` from the newest checkpoint that verifies, on whatever mesh it was written.

        Damaged checkpoints newer than that one are named in a warning and set aside as
        ``damaged-step-N.1``, out of the way of the run that goes on. Returns False when there is no
        checkpoint, or when ``checkpoint.resume`` is ``never``; then those of an earlier run are set
        aside as ``checkpoints.1``, and so on. Another ``train.dtype`` than the checkpoint's is
        allowed, with a warning.

        Raises:
            CheckpointError: it was written by another model (the message lists the fields that
                differ), or there are checkpoints and none of them verifies.
            DataError: the data changed since the checkpoint.
        """
        if self.config.checkpoint.resume == "never":
            _on_rank_0(lambda: _set_aside(self.folder, self.folder.name))
            return False
        found = _on_rank_0(self._choose)
        if found is None:
            return False
        step_dir, manifest = found
        self._check_model(step_dir, manifest["model"])
        saved, now = manifest["dtype"], self.config.train.dtype
        if saved != now and dist.get_rank() == 0:
            _warn(f"{step_dir} was trained with train.dtype={saved}; it goes on with train.dtype={now}")
        dcp.load(state.tensors(), checkpoint_id=step_dir)
        state.load_counters(manifest["counters"])
        return True

    def _commit(self, temporary: Path, final: Path, state: TrainState) -> None:
        files = sorted(path for path in temporary.iterdir() if path.name != MANIFEST)
        manifest: dict[str, Any] = {
            "counters": state.counters(),
            "model": _model_fields(self.config),
            "dtype": self.config.train.dtype,
            "files": {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files},
        }
        manifest["sha256"] = _digest(manifest)
        _write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1))
        for path in (*files, temporary):
            _flush(path)
        temporary.rename(final)
        _flush(self.folder)
        self._point_to(final.name)
        # The step just written verifies by construction, so what is deleted is never the last valid one.
        for old in self.steps()[: -max(self.config.checkpoint.keep, 1)]:
            shutil.rmtree(self.folder / old)

    def _point_to(self, name: str) -> None:
        scratch = self.folder / f".{LATEST}"
        _write_durably(scratch, f"{name}\n")
        os.replace(scratch, self.folder / LATEST)
        _flush(self.folder)

    def steps(self) -> list[str]:
        """Names of committed steps, oldest first."""
        names = [path.name for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return sorted(names, key=lambda name: int(name.removeprefix("step-")))

    def _choose(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest step that verifies and its manifest; the folder is left as if it were the newest of all."""
        for abandoned in self.folder.glob(".tmp-step-*"):  # the run directory is locked: no one writes there
            shutil.rmtree(abandoned)
        steps, latest = self.steps(), self.folder / LATEST
        promised = latest.read_text(errors="replace").strip() if latest.exists() else None
        if promised is not None and promised not in steps:
            _warn(
                f"{latest} names {promised!r}, which is not there; looking for the newest checkpoint that is"
            )
        damaged: list[str] = []
        for name in reversed(steps):
            problem = damage(self.folder / name)
            if problem is None:
                break
            damaged.append(f"{name} ({problem})")
            _warn(f"checkpoint {self.folder / name} is damaged ({problem}); trying the one before")
        else:
            if damaged or promised is not None:
                listed = "; ".join(damaged) or f"{LATEST} names {promised!r}, and there is none"
                raise CheckpointError(
                    f"{self.folder} holds no checkpoint that can be trusted: {listed}. Restore one from a copy, "
                    "or start over with checkpoint.resume=never, which sets the folder aside"
                )
            return None
        for newer in steps[steps.index(name) + 1 :]:
            _warn(f"{newer} is set aside as {_set_aside(self.folder / newer, f'damaged-{newer}')}")
        if promised != name:
            self._point_to(name)
        return self.folder / name, json.loads((self.folder / name / MANIFEST).read_text())

    def _check_model(self, step_dir: Path, saved: dict[str, Any]) -> None:
        now = _model_fields(self.config)
        differing = [key for key in sorted(now.keys() | saved.keys()) if now.get(key) != saved.get(key)]
        if differing:
            listed = "; ".join(f"model.{key} was {saved.get(key)}, is {now.get(key)}" for key in differing)
            raise CheckpointError(
                f"{step_dir} holds another model: {listed}. Set them back, choose a new run_dir, or start over "
                "with checkpoint.resume=never"
            )


def _on_rank_0(action: Callable[[], T]) -> T:
    """What ``action`` returns on rank 0, on every rank; what it raises there, too. Collective."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (CheckpointError, OSError) as error:  # the others wait for an answer
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _set_aside(path: Path, stem: str) -> str | None:
    """Rename ``path`` to the first free of ``stem.1``, ``stem.2``, ... and say which; None if it is not there."""
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{stem}.{number}")).exists():
        number += 1
    path.rename(target)
    return target.name


def _warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


def _model_fields(config: Config) -> dict[str, Any]:
    """Dotted key of ``config.model`` -> plain value, for all that shapes the model."""
    fields = dict(_flat(asdict(config.model)))
    del fields["hf_path"]  # where the first weights came from does not
    return fields


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def damage(step_dir: Path) -> str | None:
    """What is wrong with a committed step, or None: every listed file is there, whole and unchanged."""
    try:
        manifest = json.loads((step_dir / MANIFEST).read_bytes())
        if manifest.pop("sha256") != _digest(manifest):
            return f"{MANIFEST} is not as it was written"
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: {type(error).__name__}: {error}"
    for name, facts in files.items():
        path = step_dir / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, and {facts['bytes']} were written"
        if _sha256(path) != facts["sha256"]:
            return f"{name} has another SHA-256 than when it was written"
    return None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
