"""Record of a run: a JSON object per training step, and every expert's load at some of the steps.

``metrics.jsonl`` has one object per line. The last key of each line is a checksum
(``automoe.storage.sealed``), which reveals a damaged line even if it is valid JSON; readers omit
damaged lines and keep all others. Numbers are JSON numbers, but NaN and infinities, which JSON
lacks, are the strings "NaN", "Infinity" and "-Infinity"; ``float(record["loss"])`` reads both
forms. ``null`` means unknown, e.g. the MFU of hardware whose peak is unknown. This module does not
import torch.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from automoe.config.metrics import REQUIRED_KEYS
from automoe.errors import FULL, ConfigError, retried, say
from automoe.observe.environment import describe_environment
from automoe.storage.files import named, open_regular, read_file, set_aside
from automoe.storage.sealed import replace_json, sealed, unsealed

METRICS_FILE = "metrics.jsonl"
LOAD_FILE = "expert_load.jsonl"
SAMPLES_FILE = "samples.jsonl"  # the model's answers to the prompts of ``observe.samples``
MAX_LOAD_SNAPSHOTS = 200
_BUFFER_BYTES = 1 << 26  # bytes of a log that wait in memory while its disk is full
ENVIRONMENT_FILE = "environment.json"
Record = dict[str, Any]  # a line of a JSON-lines file
Records = list[Record]
Curve = tuple[np.ndarray, np.ndarray]  # steps and values
StrPath = str | os.PathLike[str]
Warn = Callable[[str], object]  # function that shows a line to the user


def to_stderr(text: str) -> None:
    say(f"automoe: {text}")


def load_summary(counts: Any, num_zero_experts: int = 0) -> Record:
    """Return load balance statistics of each MoE layer; all are 0 for a layer without tokens.

    Args:
        counts: [L, E] tokens that each expert of each layer received in one optimizer step.
        num_zero_experts: number of the last experts that compute nothing.

    Returns:
        ``max_share`` [L]: the busiest expert's share of the layer's (token, expert) choices.
        ``max_over_mean`` [L]: tokens of the busiest expert over the mean of all experts ("MaxVio");
        1 if balanced, E/K if one expert gets every token. ``entropy`` [L]: entropy of the experts'
        shares over log E; 1 if balanced, 0 for a single expert. ``expert_max_load``: the largest
        ``max_over_mean`` of all layers. With zero experts these are of the others, and
        ``zero_expert_share`` is the share of all choices that zero experts get.
    """
    counts_LE = np.asarray(counts, dtype=np.float64)
    if counts_LE.ndim != 2:
        raise ValueError(f"expert counts are [layers, experts], got shape {counts_LE.shape}")
    num_experts = counts_LE.shape[1] - num_zero_experts
    counts_LE, zeros_LZ = np.split(counts_LE, [num_experts], axis=1)
    total_L1 = counts_LE.sum(axis=1, keepdims=True)
    shares_LE = np.divide(counts_LE, total_L1, out=np.zeros_like(counts_LE), where=total_L1 > 0)
    log_LE = np.log(shares_LE, out=np.zeros_like(shares_LE), where=shares_LE > 0)
    entropy_L = -(shares_LE * log_LE).sum(axis=1) / max(math.log(num_experts), 1e-12)
    max_share_L = shares_LE.max(axis=1)
    max_over_mean_L = max_share_L * num_experts
    num_zeros = zeros_LZ.sum()
    share = {"zero_expert_share": float(num_zeros / max(num_zeros + counts_LE.sum(), 1))}
    return (share if num_zero_experts else {}) | {
        "max_share": max_share_L.tolist(),
        "max_over_mean": max_over_mean_L.tolist(),
        "entropy": np.abs(entropy_L).tolist(),  # abs avoids -0.0
        "expert_max_load": float(max_over_mean_L.max(initial=0.0)),
    }


def jsonable(value: Any) -> Any:
    """Convert ``value`` to JSON types; non-finite floats become strings, as in ``metrics.jsonl``."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy array, numpy scalar or torch tensor
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


class AppendLog:
    """Append-only JSON-lines file of step records that survives a kill mid-line, and a full disk.

    Records that do not fit on the disk stay in the file object's buffer until they fit, so a full
    disk neither ends a run nor leaves a gap in its record.

    Args:
        path: the file.
        resume_step: last step to keep in an existing file, which ``cut`` shortens. None renames an
            existing file and starts a new one.
        warn: function that shows a line about damage or a full disk to the user.
        every_step: True if each step should have a record; missing ones are then reported.

    Attributes:
        steps: the steps of the file's records.
        waiting: number of bytes that did not fit on the disk yet.
    """

    def __init__(
        self, path: Path, resume_step: int | None, warn: Warn, every_step: bool = False
    ) -> None:
        self.path = path
        self.steps: list[int] = []
        self.waiting = 0
        self._warn = warn
        if resume_step is None and path.exists() and path.stat().st_size:
            set_aside(path, path.stem)

        def opened() -> io.BufferedWriter:
            with named(path):
                return os.fdopen(_open(path), "ab", _BUFFER_BYTES)

        self._file = retried(opened)
        self._kept_bytes = 0 if resume_step is None else self._read_until(resume_step, every_step)

    def cut(self) -> None:
        """Remove the records after ``resume_step``, and an incomplete last line."""
        os.truncate(self._file.fileno(), self._kept_bytes)

    def append(self, record: Mapping[str, Any]) -> None:
        self.steps.append(record["step"])
        line = sealed(jsonable(record), allow_nan=False).encode() + b"\n"
        self.waiting += len(line)
        try:
            with named(self.path, self.waiting):
                self._file.write(line)
                retried(self._file.flush)
            self.waiting = 0
        except OSError as error:
            if error.errno not in FULL:
                raise
            if self.waiting == len(line):  # the first line that did not fit
                self._warn(f"{self.path}: {error.strerror}; kept in memory until it fits")

    def close(self) -> None:
        """Write the records that are still in memory, and close the file.

        Raises:
            OSError: they do not fit on the disk.
        """
        with named(self.path, self.waiting):
            self._file.close()

    def _read_until(self, step: int, every_step: bool) -> int:
        """Read the records up to ``step`` and return their bytes; warn about missing ones.

        A damaged line counts too, since readers omit it; an incomplete last line does not.

        Args:
            step: last step whose record is kept.
            every_step: True if each step should have a record.
        """
        size = 0
        first = 1
        for number, (raw, record) in enumerate(_lines(self.path, self._warn), start=1):
            if not raw.endswith(b"\n") or (record and record["step"] > step):
                break
            size += len(raw)
            if record is None:
                continue
            if not self.steps:  # A run that began at another run's step has no records before it.
                first = max(1, record["step"] - number + 1)
            self.steps.append(record["step"])
        missing = sorted({*range(first, step + 1)} - {*self.steps})
        if every_step and missing:
            self._warn(f"{self.path}: no record of steps: {', '.join(ranges(missing))}")
        return size


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Writer of the records in a run directory, for one process (rank 0).

    The files are ``metrics.jsonl``, ``expert_load.jsonl``, ``samples.jsonl`` and
    ``environment.json``.

    Args:
        run_dir: an existing directory.
        resume_step: last step of the checkpoint that training continues from (0: from the start).
            Later records are removed, because their steps will run again. None means a new run:
            records of an earlier run are renamed to ``metrics.1.jsonl`` and so on.
        warn: function that shows a line about damaged records or a full disk to the user.
        num_steps: steps of the whole run; at most 200 of them (``MAX_LOAD_SNAPSHOTS``), evenly spaced,
            and the first one have a record of every expert's load.

    Raises:
        ConfigError: an existing file cannot be read or written.
    """

    def __init__(
        self,
        run_dir: StrPath,
        resume_step: int | None = None,
        warn: Warn = to_stderr,
        num_steps: int = MAX_LOAD_SNAPSHOTS,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._warn = warn
        self._num_steps = num_steps
        try:
            replace_json(self.run_dir / ENVIRONMENT_FILE, describe_environment())
            metrics = self.run_dir / METRICS_FILE
            self._metrics = AppendLog(metrics, resume_step, warn, every_step=True)
            self._load = AppendLog(self.run_dir / LOAD_FILE, resume_step, warn)
            # The first sample creates the file; an existing one is truncated like the others.
            samples = self.run_dir / SAMPLES_FILE
            self._samples = AppendLog(samples, resume_step, warn) if samples.exists() else None
            # Only now: a file that cannot be read ends the run with all of them as they were.
            for log in (self._metrics, self._load, self._samples):
                if log is not None:
                    log.cut()
        except OSError as error:
            path = error.filename2 or error.filename
            raise ConfigError(
                "run_dir",
                run_dir,
                f"{path} cannot be opened: {error.strerror}",
                "Correct its permissions, or move it away",
            ) from None

    def write(self, record: Mapping[str, Any], counts: Any = None) -> None:
        """Append the record of one step to ``metrics.jsonl``.

        Args:
            record: every key of ``REQUIRED_KEYS`` (``step``, ``loss``, ``grad_norm``, ``lr``,
                ...), and optional keys (balance losses, ``step_seconds``, ``val_loss`` and
                ``val_bits_per_byte`` of validating steps); None means unknown.
            counts: [L, E] tokens per expert in this step, for the MoE layers in model order; they
                are written to ``expert_load.jsonl`` at some of the steps. None: a dense model.
        """
        step = record["step"]
        missing = [key for key in REQUIRED_KEYS if key not in record]
        assert not missing, f"metrics of step {step} lack {missing}"
        self._metrics.append(record)
        stride = math.ceil(self._num_steps / MAX_LOAD_SNAPSHOTS)
        chosen = not self._load.steps or (self._num_steps - step) % stride == 0
        if counts is not None and chosen:
            self._load.append({"step": step, "counts": counts})

    def write_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Append answers that the model generated after ``step`` to ``samples.jsonl``.

        Args:
            samples: one {``prompt``: text, ``text``: answer} per prompt.
        """
        if self._samples is None:
            self._samples = AppendLog(self.run_dir / SAMPLES_FILE, None, self._warn)
        self._samples.append({"step": step, "samples": samples})

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # the others too if one fails
            for log in (self._samples, self._metrics, self._load):
                if log is not None:
                    closing.callback(log.close)

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> int:
    return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _lines(path: StrPath, warn: Warn | None = None) -> list[tuple[bytes, Record | None]]:
    """Return (line, record) for every line of a JSON-lines file.

    The line is its bytes with the line end; the record is None if the line is damaged or
    incomplete. A missing file has no lines.

    Args:
        warn: function that shows the numbers of damaged lines to the user. An incomplete last line,
            which a killed process leaves, is not reported.
    """
    try:
        content = read_file(Path(path))
    except FileNotFoundError:
        return []
    lines = []
    damaged = []
    for number, raw in enumerate(io.BytesIO(content), start=1):
        record = None
        with contextlib.suppress(ValueError):  # A power loss can leave zeros inside the file.
            record = unsealed(raw) if raw.endswith(b"\n") else None
        if record is not None and type(record.get("step")) is not int:
            record = None
        if record is None and raw.endswith(b"\n"):
            damaged.append(number)
        lines.append((raw, record))
    if damaged and warn is not None:
        warn(f"{path}: damaged lines: {', '.join(ranges(damaged))}")
    return lines


def ranges(numbers: list[int]) -> list[str]:
    """Format sorted numbers as ranges of consecutive ones: ``3``, ``5-9``."""
    there = set(numbers)
    starts = [number for number in numbers if number - 1 not in there]
    ends = [number for number in numbers if number + 1 not in there]
    return [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]


def read_jsonl(path: StrPath, warn: Warn | None = None) -> Records:
    """Return the undamaged records of a JSON-lines file in the order of their steps.

    If a step has several records, the last one is returned. A missing file has no records.

    Args:
        warn: function that shows the numbers of damaged lines to the user.
    """
    records = {record["step"]: record for _, record in _lines(path, warn) if record}
    return [records[step] for step in sorted(records)]


def read_metrics(run_dir: StrPath) -> Records:
    """Return the step records of a run, oldest first; NaN and infinity are strings, such as "NaN"."""
    return read_jsonl(Path(run_dir) / METRICS_FILE)


def last_objective(run_dir: StrPath, step: int) -> float | None:
    """Return the final loss of a run that ended at ``step``: validation loss, else training loss.

    It is of the last step that has a validation or was not skipped. The result is None if the
    run's record does not reach ``step``.
    """
    for back, record in enumerate(reversed(read_metrics(run_dir))):
        if record["step"] != step - back:
            break
        if "val_loss" in record or not record.get("skipped"):
            return float(record.get("val_loss", record["loss"]))
    return None


def read_expert_load(run_dir: StrPath) -> Curve:
    """Return the recorded expert loads of a run: step numbers [N] and tokens per expert [N, L, E].

    They are recorded at some of the steps. N is 0 without a record, and L is 0 for a dense model.
    """
    records = read_jsonl(Path(run_dir) / LOAD_FILE)
    steps = np.array([record["step"] for record in records], dtype=np.int64)
    counts = np.array([record["counts"] for record in records], dtype=np.float64)
    return steps, counts if counts.ndim == 3 else np.zeros((len(records), 0, 0))


def rank_balance(counts: np.ndarray, ep: int, num_experts: int) -> float | None:
    """Return how uneven expert parallel ranks are: tokens of the busiest rank over the mean rank.

    The ratio is averaged over layers; the result is its median over steps. It is None if ``counts``
    has no tokens.

    Args:
        counts: [N, L, E + Z] tokens per expert, of N steps and L layers.
        ep: number of ranks that share the experts.
        num_experts: E; the Z zero experts after them are on no rank.
    """
    counts = counts[..., :num_experts]
    if not counts.size or not counts.sum():
        return None
    ranks = counts.reshape(*counts.shape[:2], ep, -1).sum(axis=3)  # A rank's experts are adjacent.
    return float(np.median((ranks.max(axis=2) / ranks.mean(axis=2).clip(1e-9)).mean(axis=1)))


def series(records: Records, key: str) -> Curve:
    """Return (steps [n] int64, values [n] float64) of the records in which ``key`` is not None.

    NaN and infinity are among the values.
    """
    having = [record for record in records if record.get(key) is not None]
    steps = np.array([record["step"] for record in having], dtype=np.int64)
    return steps, np.array([float(record[key]) for record in having], dtype=np.float64)
