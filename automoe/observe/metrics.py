"""The record of a run: one JSON object a step, and a thinned record of every expert's load.

``metrics.jsonl`` holds one object a line. Numbers are JSON numbers, except that NaN and infinities,
which JSON does not have, are the strings "NaN", "Infinity" and "-Infinity" (``float()`` reads all
three, so ``float(record["loss"])`` is right for every line). ``null`` means not known, e.g. the MFU
on hardware whose peak is unknown. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from automoe import __version__

METRICS_FILE = "metrics.jsonl"
LOAD_FILE = "expert_load.jsonl"
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
MAX_LOAD_SNAPSHOTS = 200
ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("torch", "transformers", "safetensors", "torchtitan", "triton", "numpy", "hydra-core", "wandb")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


class AppendLog:
    """A JSON-lines file that survives a kill in the middle of a line and a full disk.

    A line that does not fit on the disk is taken back and kept for the next write, so that a run
    outlives a full disk without a gap in its record.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.path = path
        self.num_records = 0
        self._pending = b""
        self._warned = False
        if resume_step is None and path.exists() and path.stat().st_size:
            _set_aside(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if resume_step is not None:
            self._truncate_after(resume_step)

    def append(self, record: Mapping[str, Any]) -> None:
        self._pending += json.dumps(jsonable(record), allow_nan=False).encode() + b"\n"
        self.num_records += 1
        self.flush()

    def flush(self) -> None:
        end = os.fstat(self._fd).st_size
        written = 0
        try:
            while written < len(self._pending):
                written += os.write(self._fd, self._pending[written:])
        except OSError as error:
            if error.errno not in FULL:
                raise
            # Half a line would make the next one unreadable; training is worth more than its log.
            os.ftruncate(self._fd, end)
            if not self._warned:
                print(f"automoe: {self.path}: {error.strerror}; kept in memory until it fits", file=sys.stderr)
            self._warned = True
            return
        self._pending = b""
        self._warned = False

    def close(self) -> None:
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def _truncate_after(self, step: int) -> None:
        """Drop everything from the first line that is past ``step`` or was cut by a kill."""
        kept = 0
        for length, record in _whole_lines(self.path):
            if record["step"] > step:
                break
            kept += length
            self.num_records += 1
        os.ftruncate(self._fd, kept)


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Writes ``metrics.jsonl``, ``expert_load.jsonl`` and ``environment.json`` of a run directory.

    Args:
        run_dir: an existing directory.
        resume_step: the last step of the checkpoint that training continues from (0: from the
            start); records past it are dropped, since their steps will be run again. None is a new
            run: records of an earlier one are set aside as ``metrics.1.jsonl``, and so on.

    Use from one process (rank 0).
    """

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self._metrics = AppendLog(self.run_dir / METRICS_FILE, resume_step)
        self._load = AppendLog(self.run_dir / LOAD_FILE, resume_step)
        # Steps between two snapshots; of a resumed run as it was, where the first may be off the grid.
        sampled = [record["step"] for record in read_jsonl(self._load.path)]
        self._stride = sampled[2] - sampled[1] if len(sampled) > 2 else 1
        self._last_load: dict[str, Any] | None = None  # newest counts, written at the end if not sampled
        (self.run_dir / ENVIRONMENT_FILE).write_text(json.dumps(describe_environment(), indent=1) + "\n")

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

    def close(self) -> None:
        if self._last_load is not None:
            self._load.append(self._last_load)
            self._last_load = None
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
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        except OSError as error:
            if error.errno not in FULL:
                raise
            temporary.unlink(missing_ok=True)
            return  # a longer record is no harm; the next snapshot tries again
        self._stride = stride
        self._load.close()
        os.replace(temporary, path)
        self._load = AppendLog(path, resume_step=kept[-1]["step"])


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a JSON-lines file up to the first line that a kill cut; [] when there is no file."""
    return [record for _, record in _whole_lines(Path(path))] if os.path.exists(path) else []


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Length in bytes and record of every line up to the first that is damaged."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:  # a machine that lost power can leave zeros inside the file
                return
            if not isinstance(record, dict) or "step" not in record:
                return
            yield len(line), record


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The steps of a run, oldest first, as written (non-finite numbers are strings)."""
    return read_jsonl(Path(run_dir) / METRICS_FILE)


def last_objective(run_dir: str | os.PathLike[str]) -> float | None:
    """What a run that is over came to: the last record's validation loss, else the last training loss of a step taken.

    None when nothing is recorded.
    """
    for record in reversed(read_metrics(run_dir)):
        if "val_loss" in record or not record.get("skipped"):
            return float(record.get("val_loss", record["loss"]))
    return None


def read_expert_load(run_dir: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sampled expert counts of a run: steps [N] and counts [N, L, E]; N may be 0, and L of a dense model is."""
    records = read_jsonl(Path(run_dir) / LOAD_FILE)
    if not records:
        return np.zeros(0, dtype=np.int64), np.zeros((0, 0, 0))
    steps = np.array([record["step"] for record in records])
    counts = np.array([record["counts"] for record in records], dtype=np.float64)
    return steps, counts if counts.ndim == 3 else np.zeros((len(records), 0, 0))


def series(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have ``key``; NaN and infinities come back as floats."""
    pairs = [(record["step"], float(record[key])) for record in records if record.get(key) is not None]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


def _set_aside(path: Path) -> None:
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(older)


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
