"""The record of a run: one JSON object a step, and a thinned record of every expert's load.

``metrics.jsonl`` holds one object a line. Its last key is a seal (``automoe.storage.sealed``): a line that was
damaged is known as such whatever it still says; it is left out and the others stay.
Numbers are JSON numbers, except that NaN and infinities, which JSON does not have, are the strings
"NaN", "Infinity" and "-Infinity" (``float()`` reads all three, so ``float(record["loss"])`` is
right for every line). ``null`` means not known, e.g. the MFU on hardware whose peak is unknown.
Nothing here imports torch."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import platform
import shutil
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from automoe import __version__
from automoe.errors import ConfigError, retried
from automoe.storage.sealed import SEAL, replace_json, sealed, unsealed

METRICS_FILE = "metrics.jsonl"
LOAD_FILE = "expert_load.jsonl"
SAMPLES_FILE = "samples.jsonl"  # what the model answered to ``observe.samples``
REQUIRED_KEYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",  # trained so far in the whole run, labels that count
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
    "expert_max_load",
)
# What else a step's record may have of its own, with its seal, and what a validation adds to it.
OTHER_KEYS = (
    "step_seconds skipped skip_reason skipped_rows skipped_documents num_skipped_documents mfu_full_attention "
    "seq_balance_loss global_balance_loss micro_batch_balance_loss z_loss max_share max_over_mean entropy "
    "dropped_share fp8_clipped_share probe_seconds_min probe_seconds_median probe_seconds_max slowest_rank "
    "slowest_host checkpoint_seconds checkpoint_share checkpoint_in_flight checkpoint_failures"
).split()
VALIDATION_KEYS = ("val_loss", "val_loss_ema", "val_perplexity", "val_bits_per_byte")
MAX_LOAD_SNAPSHOTS = 200
ENVIRONMENT_FILE = "environment.json"
PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "torchtitan",
    "triton",
    "numpy",
    "hydra-core",
    "wandb",
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND


def load_summary(counts: Any) -> dict[str, Any]:
    """Balance of each MoE layer over one optimizer step; a layer without one token is all zeros.

    Args:
        counts: [L, E] tokens that each expert of each layer received.

    Returns:
        ``max_share`` [L], the share of the layer's assignments that its busiest expert takes; ``max_over_mean`` [L],
        the busiest expert over the mean one ("MaxVio"), which is 1 when balanced and E/K when it gets every token;
        ``entropy`` [L] of the shares over log E, 1 when balanced and 0 for one expert; and ``expert_max_load``, the
        worst layer's ``max_over_mean``.
    """
    counts_LE = np.asarray(counts, dtype=np.float64)
    if counts_LE.ndim != 2:
        raise ValueError(f"expert counts are [layers, experts], got shape {counts_LE.shape}")
    num_experts = counts_LE.shape[1]
    total_L1 = counts_LE.sum(axis=1, keepdims=True)
    shares_LE = np.divide(counts_LE, total_L1, out=np.zeros_like(counts_LE), where=total_L1 > 0)
    log_LE = np.log(shares_LE, out=np.zeros_like(shares_LE), where=shares_LE > 0)
    entropy_L = -(shares_LE * log_LE).sum(axis=1) / max(math.log(num_experts), 1e-12)
    max_share_L = shares_LE.max(axis=1)
    max_over_mean_L = max_share_L * num_experts
    return {
        "max_share": max_share_L.tolist(),
        "max_over_mean": max_over_mean_L.tolist(),
        "entropy": np.abs(entropy_L).tolist(),  # abs: no -0.0
        "expert_max_load": float(max_over_mean_L.max(initial=0.0)),
    }


def jsonable(value: Any) -> Any:
    """``value`` with plain numbers, and strings for what JSON cannot say (see the module's docstring)."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # a numpy array or scalar, or a torch tensor
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def is_taken(name: str) -> bool:
    """Whether some step's record has ``name`` for a number of its own, so that no other number may have it."""
    return name in (*REQUIRED_KEYS, *OTHER_KEYS, *VALIDATION_KEYS, SEAL) or name.startswith(
        "val_loss."
    )


class AppendLog:
    """A JSON-lines file that survives a kill in the middle of a line, a full disk, and lines that were damaged.

    A line that does not fit on the disk is taken back and kept for the next write, so that a run
    outlives a full disk without a gap in its record.

    Args:
        resume_step: the last step that stays in a file that goes on. Where lines before it are damaged, the file as it
            was is kept as ``metrics.damaged.1.jsonl``. None sets aside a file that is there.
        every_step: a step without a record is a damage too.
        warn: takes a line for the user.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int | None,
        every_step: bool = False,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        self.path = path
        self.num_records = 0
        self._pending = b""
        self._warned = False
        self._warn = warn or _to_stderr
        if resume_step is None and path.exists() and path.stat().st_size:
            path.rename(_free_name(path, path.stem))
        self._fd = os.open(path, _APPEND, 0o644)
        if resume_step is not None:
            self._truncate_after(resume_step, every_step)

    def append(self, record: Mapping[str, Any]) -> None:
        self._pending += _line(record)
        self.num_records += 1
        self.flush()

    def flush(self) -> None:
        end = os.fstat(self._fd).st_size
        written = 0
        try:
            while written < len(self._pending):
                rest = self._pending[written:]
                written += retried(lambda rest=rest: os.write(self._fd, rest))
        except OSError as error:
            if error.errno not in FULL:
                raise
            # Half a line would make the next one unreadable; training is worth more than its log.
            os.ftruncate(self._fd, end)
            if not self._warned:
                self._warn(f"{self.path}: {error.strerror}; kept in memory until it fits")
            self._warned = True
            return
        self._pending = b""
        self._warned = False

    def close(self) -> None:
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def _truncate_after(self, step: int, every_step: bool) -> None:
        """Drop what is past ``step``, and the line that a kill cut; leave out what is damaged, and say so."""
        lines = [line for line, _ in _lines(self.path)]
        good = {line.step: line for line in lines if line.step is not None and line.step <= step}
        kept = [good[number] for number in sorted(good)]
        missing = _without_record(lines, kept, step) if every_step else []
        end = next(
            (line.number for line in lines if line.step is not None and line.step > step),
            len(lines) + 1,
        )
        if every_step and not missing:  # what is damaged behind the last one is run again
            end = max((line.number for line in kept), default=0)
        damaged = [line.number for line in lines[: end - 1] if line.step is None and line.whole]
        self.num_records = len(kept)
        told = [f"damaged lines: {_numbers(damaged)}"] if damaged else []
        told += [f"no record of steps: {_numbers(missing)}"] if missing else []
        if kept == lines[: len(kept)]:
            os.ftruncate(self._fd, sum(line.length for line in kept))
        else:
            told.append(f"the file as it was is kept as {self._rewrite(kept)}")
        if told:
            self._warn(f"{self.path}: {'; '.join(told)}")

    def _rewrite(self, kept: list[_Line]) -> str:
        """Leave ``kept`` in the file; the name under which it is kept as it was."""
        aside = _free_name(self.path, f"{self.path.stem}.damaged")
        shutil.copyfile(self.path, aside)
        scratch = self.path.with_suffix(".tmp")
        with self.path.open("rb") as old, scratch.open("wb") as new:
            for line in kept:
                old.seek(line.start)
                new.write(old.read(line.length))
        os.close(self._fd)
        os.replace(scratch, self.path)
        self._fd = os.open(self.path, _APPEND, 0o644)
        return aside.name


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Writes ``metrics.jsonl``, ``expert_load.jsonl``, ``samples.jsonl`` and ``environment.json`` of a run directory.

    Args:
        run_dir: an existing directory.
        resume_step: the last step of the checkpoint that training continues from (0: from the
            start); records past it are dropped, since their steps will be run again. None is a new
            run: records of an earlier one are set aside as ``metrics.1.jsonl``, and so on.
        warn: takes a line for the user: what of an earlier record is damaged, a full disk. None: standard error.

    Use from one process (rank 0).

    Raises:
        ConfigError: a file is there that cannot be read or written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        resume_step: int | None = None,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        try:
            replace_json(self.run_dir / ENVIRONMENT_FILE, describe_environment())
            for name in (METRICS_FILE, LOAD_FILE) if resume_step is not None else ():
                os.close(os.open(self.run_dir / name, _APPEND, 0o644))  # both, before one is cut
            self._metrics = AppendLog(
                self.run_dir / METRICS_FILE, resume_step, every_step=True, warn=warn
            )
            self._load = AppendLog(self.run_dir / LOAD_FILE, resume_step, warn=warn)
            # Made with the first sample; one that is there is cut back like the others.
            samples = self.run_dir / SAMPLES_FILE
            self._samples = AppendLog(samples, resume_step, warn=warn) if samples.exists() else None
            # Steps between two snapshots; of a resumed run as it was, where the first may be off the grid.
            steps = [record["step"] for record in read_jsonl(self._load.path)]
            sampled = np.diff(steps[1:])
            self._stride = statistics.mode(sampled.tolist()) if len(sampled) else 1
            if steps and steps[-1] < (due := (resume_step or 0) // self._stride * self._stride):
                (warn or _to_stderr)(
                    f"{self._load.path}: it ends after step {steps[-1]} and went to {due} at least"
                )
            self._last_load: dict[str, Any] | None = (
                None  # newest counts, written at the end if not sampled
            )
        except OSError as error:
            path, remedy = (
                error.filename2 or error.filename,
                "Mend its permissions, or move it away",
            )
            raise ConfigError(
                "run_dir", run_dir, f"{path} cannot be opened: {error.strerror}", remedy
            ) from None

    def write(self, record: Mapping[str, Any], counts: Any = None) -> None:
        """Append one step.

        Args:
            record: every key of ``REQUIRED_KEYS``, and any more (balance losses, ``step_seconds``,
                ``val_loss`` and ``val_bits_per_byte`` on the steps that validate). None: not known.
            counts: tokens per expert in this step, [L, E] over the MoE layers in model order.
        """
        missing = [key for key in REQUIRED_KEYS if key not in record]
        assert not missing, f"metrics of step {record.get('step')} lack {missing}"
        self._metrics.append(record)
        if counts is None:
            return
        snapshot = {"step": record["step"], "counts": jsonable(counts)}
        if record["step"] % self._stride and self._load.num_records:
            self._last_load = snapshot
            return
        self._last_load = None
        self._load.append(snapshot)
        if self._load.num_records > MAX_LOAD_SNAPSHOTS:
            self._thin()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Append what the model answered after ``step``: ``prompt`` and ``text`` of each sample."""
        if self._samples is None:
            self._samples = AppendLog(self.run_dir / SAMPLES_FILE, None)
        self._samples.append({"step": step, "samples": samples})

    def close(self) -> None:
        if self._last_load is not None:
            self._load.append(self._last_load)
            self._last_load = None
        if self._samples is not None:
            self._samples.close()
        self._metrics.close()
        self._load.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _thin(self) -> None:
        """Double the stride, so that a run of any length leaves at most MAX_LOAD_SNAPSHOTS."""
        path = self._load.path
        stride, kept = self._stride, read_jsonl(path)
        while len(kept) > MAX_LOAD_SNAPSHOTS:
            stride *= 2
            kept = kept[:1] + [record for record in kept[1:] if record["step"] % stride == 0]
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(b"".join(map(_line, kept)))
        except OSError as error:
            if error.errno not in FULL:
                raise
            temporary.unlink(missing_ok=True)
            return  # a longer record is no harm; the next snapshot tries again
        self._stride = stride
        self._load.close()
        os.replace(temporary, path)
        self._load = AppendLog(path, resume_step=kept[-1]["step"])


class _Line(NamedTuple):
    """Where a line is in its file; ``step`` is None where it is damaged, ``whole`` False where a kill cut it."""

    number: int
    start: int
    length: int
    step: int | None
    whole: bool


def _line(record: Mapping[str, Any]) -> bytes:
    return sealed(jsonable(record), allow_nan=False).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[_Line, dict[str, Any]]]:
    """Every line of a file, each judged by itself, and its record; {} of one that is damaged."""
    start = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            whole, record = raw.endswith(b"\n"), {}
            with contextlib.suppress(
                ValueError
            ):  # a machine that lost power can leave zeros inside the file
                record = unsealed(raw) if whole else {}
            if type(record.get("step")) is not int:
                record = {}
            yield _Line(number, start, len(raw), record.get("step"), whole), record
            start += len(raw)


def _without_record(lines: list[_Line], kept: list[_Line], step: int) -> list[int]:
    """Steps up to ``step`` that have no line; a run that started from another's checkpoint has none before its own."""
    first = 1
    if kept:
        first = max(1, kept[0].step - sum(line.step is None for line in lines[: kept[0].number]))
    return sorted(set(range(first, step + 1)) - {line.step for line in kept})


def _numbers(numbers: list[int]) -> str:
    """``3, 5-9``, of numbers in order."""
    there = set(numbers)
    starts, ends = ([n for n in numbers if n + side not in there] for side in (-1, 1))
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(ranges[:8]) + (f" and {len(ranges) - 8} more" if len(ranges) > 8 else "")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a JSON-lines file in the order of their steps, without damaged lines; [] when there is no file.

    Of two lines of one step the last counts.
    """
    if not os.path.exists(path):
        return []
    records = {line.step: record for line, record in _lines(Path(path)) if line.step is not None}
    return [records[step] for step in sorted(records)]


def damaged_lines(path: str | os.PathLike[str]) -> str:
    """Numbers of the lines that ``read_jsonl`` leaves out, the one apart that a kill cut; empty where there is none."""
    if not os.path.exists(path):
        return ""
    return _numbers(
        [line.number for line, _ in _lines(Path(path)) if line.whole and line.step is None]
    )


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The steps of a run, oldest first, as written (non-finite numbers are strings)."""
    return read_jsonl(Path(run_dir) / METRICS_FILE)


def last_objective(run_dir: str | os.PathLike[str], step: int) -> float | None:
    """What a run that ended at ``step`` came to: its validation loss, else the last training loss of a step taken.

    None when a step has no record on which that depends.
    """
    for back, record in enumerate(reversed(read_metrics(run_dir))):
        if record["step"] != step - back:
            break
        if "val_loss" in record or not record.get("skipped"):
            return float(record.get("val_loss", record["loss"]))
    return None


def perplexity(loss: Any) -> float:
    """exp of a loss in nats a token, as a number or as a record writes it; infinite where a float does not reach."""
    try:
        return math.exp(float(loss))
    except OverflowError:
        return math.inf


def read_expert_load(run_dir: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sampled expert counts of a run: steps [N] and counts [N, L, E]; N may be 0, and L of a dense model is."""
    records = read_jsonl(Path(run_dir) / LOAD_FILE)
    if not records:
        return np.zeros(0, dtype=np.int64), np.zeros((0, 0, 0))
    steps = np.array([record["step"] for record in records])
    counts = np.array([record["counts"] for record in records], dtype=np.float64)
    return steps, counts if counts.ndim == 3 else np.zeros((len(records), 0, 0))


def rank_balance(counts: np.ndarray, ep: int) -> float | None:
    """Rows of the busiest of ``ep`` ranks over the mean, of an average layer: the median of counts [N, L, E].

    None where there is none.
    """
    if not counts.size or not counts.sum():
        return None
    ranks = counts.reshape(*counts.shape[:2], ep, -1).sum(
        axis=3
    )  # a rank's experts lie side by side
    return float(np.median((ranks.max(axis=2) / ranks.mean(axis=2).clip(1e-9)).mean(axis=1)))


def series(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have ``key``; NaN and infinities come back as floats."""
    pairs = [
        (record["step"], float(record[key])) for record in records if record.get(key) is not None
    ]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


def _free_name(path: Path, stem: str) -> Path:
    """``stem.1.jsonl`` beside ``path``, or the first of these that is free."""
    number = 1
    while (free := path.with_name(f"{stem}.{number}{path.suffix}")).exists():
        number += 1
    return free


def _to_stderr(text: str) -> None:
    print(f"automoe: {text}", file=sys.stderr)


def describe_environment() -> dict[str, str]:
    """Versions and hardware as text. Imports no package it names; the GPU is asked only if torch is loaded."""
    environment = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} usable",
        "python": platform.python_version(),
        "automoe": __version__,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        environment["gpu"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    for package in PACKAGES:
        try:
            environment[package] = version(package)
        except PackageNotFoundError:
            environment[package] = "not installed"
    return environment
