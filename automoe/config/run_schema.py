"""Sections of the configuration about a run: ``observe``, ``launch`` and ``cluster``.

Nothing here imports torch or Hydra.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automoe.config.paths import PathText


@dataclass
class ObserveConfig:
    """Settings of console, report, trackers (W&B, TensorBoard, MLflow) and profiles.

    ``samples`` are prompts that the model answers after each validation, in up to ``sample_tokens``
    tokens. ``log_every`` counts steps, ``profile_steps`` is a range to trace (``10-12``), and
    ``objective`` is what a sweeper optimizes. ``report`` writes ``report.html``; ``run_*`` are
    name, group and tags of the run in trackers. ``mlflow`` is MLflow's tracking URI; empty: off.
    """

    # steps between lines on the console; 0: by time, about 30 lines a run and one in 30 s at least;
    # metrics.jsonl has every step
    log_every: int = 0
    # prompts that the model answers after each validation: a list, or a text file with one prompt
    # per line (docs/finetune.md)
    samples: list[str] | PathText = field(default_factory=list)
    sample_tokens: int = 48  # limit of an answer, in tokens
    report: bool = True  # write report.html and PNG plots when the run ends or fails
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    wandb_project: str = "automoe"
    tensorboard: bool = False  # write event files to run_dir/tensorboard
    mlflow: str = ""  # MLflow tracking URI: a server or a folder; empty: no MLflow
    mlflow_experiment: str = "automoe"
    run_name: str | None = None  # name in trackers; null: the last part of run_dir
    run_group: str | None = None  # group in trackers; null: the sweep that the run is a job of
    run_tags: list[str] = field(default_factory=list)  # tags in trackers
    # what a sweeper such as Optuna optimizes: the lowest loss, or the highest speed
    objective: Literal["loss", "tokens_per_second"] = "loss"
    # steps to trace with torch's profiler, such as "10-12"; traces are in run_dir/profile
    profile_steps: str = ""


@dataclass
class LaunchConfig:
    """Settings for starting and watching ranks (``docs/launch.md``).

    ``num_ranks`` is used if an axis of the mesh is -1; null: as many as GPUs or CPU cores allow.
    ``timeout_s`` limits a collective of a training step, ``init_timeout_s`` one before the end of
    the first step or after the last. ``grace_s`` is the time for saving after a signal. ``numa``
    binds a rank to the CPU cores next to its GPU. Every ``gc_every`` steps all ranks collect
    garbage; every ``probe_every`` steps they time a matmul, to find slow ranks. A failed run
    restarts from its newest checkpoint up to ``max_restarts`` times. ``threads_per_rank`` counts
    CPU threads.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if torch can use a visible GPU
    # ranks to start if an axis of the mesh is -1; null: as many as the GPUs or CPU cores allow
    num_ranks: int | None = None
    # seconds after which a collective of a training step fails; the error names the missing rank
    timeout_s: int = 600
    # the same limit before the end of the first step and after the last one, for loading, compiling
    # and export
    init_timeout_s: int = 1800
    # seconds that ranks have after SIGTERM or Ctrl-C to finish their step and save, before they are
    # killed
    grace_s: int = 120
    max_restarts: int = 0  # how often a failed run restarts from its newest checkpoint
    threads_per_rank: int = 1  # CPU threads of one rank; 0: an equal share of the cores
    # collect Python's garbage every this many steps, on all ranks at the same time; 0: leave it to
    # Python, whose collections come at other times on each rank
    gc_every: int = 50
    # bind each CUDA rank to the CPU cores next to its GPU; torchrun and srun have their own options
    numa: bool = False
    # steps between timings of one matrix product on every rank, which find slow ranks; 0: none
    probe_every: int = 10


@dataclass
class ClusterConfig:
    """The hardware that plan and MFU are computed for.

    Memory (bytes), FLOP/s and bandwidths (bytes/s) are those of one GPU (``host_bandwidth``: to CPU
    memory), but ``storage_bandwidth`` is that of a node to checkpoint storage, ``storage_limit``
    that of all nodes together. ``cores`` are those of a CPU node, which its ranks share.

    ``gemm_curve`` has the shares of ``peak_flops`` that matmuls reach at 1, 2, 4, ... times
    ``gemm_curve_from`` FLOPs per byte, ``links`` the measured [delay in s, bytes/s] of
    collectives (``all_to_all 4x2``: in groups of 4 ranks with stride 2), and ``constants`` replace
    those of the planner's time model.
    """

    name: str = "laptop"  # shown in the plan
    gpu: str = "cpu"  # name as torch reports it, to look up peak FLOP/s
    gpus_per_node: int = 8
    memory_bytes: float = 0.0  # memory of a GPU; 0: unknown
    peak_flops: float = 0.0  # dense bfloat16 FLOP/s of a GPU; 0: unknown
    peak_flops_fp8: float = 0.0  # dense 8-bit FLOP/s of a GPU; 0: it has no 8-bit products
    memory_bandwidth: float = 0.0  # bytes/s of a GPU's memory; 0: unknown
    # bytes/s per direction between one GPU and the others of its node; 0: unknown
    intra_node_bandwidth: float = 0.0
    inter_node_bandwidth: float = 0.0  # bytes/s per direction from one GPU to other nodes
    host_bandwidth: float = 0.0  # bytes/s between one GPU and CPU memory; 0: 16e9 is assumed
    # bytes/s from one node to the storage of checkpoints; 0: 2e9 is assumed
    storage_bandwidth: float = 0.0
    # bytes/s from all nodes together to that storage; 0: no limit besides that of each node
    storage_limit: float = 0.0
    # efficiency of matrix products, as shares of peak_flops, at 1, 2, 4, ... times gemm_curve_from
    # FLOPs per byte read and written; empty: not measured, and predictions are marked uncalibrated
    gemm_curve: list[float] = field(default_factory=list)
    gemm_curve_from: float = 64.0  # FLOPs per byte at the first share of gemm_curve
    # plans for CPUs: cores of a node, which its ranks share; 0: every rank has its own device
    cores: int = 0
    # measured constants that replace those of automoe/planner/constants.toml, by name
    constants: dict[str, float] = field(default_factory=dict)
    # measured delay in seconds and bytes/s that a rank sends, of all_gather, reduce_scatter,
    # all_to_all and send in groups within a node, by size and stride of the group, such as
    # "all_to_all 4x2"; other groups go by the speeds above
    links: dict[str, list[float]] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.gpu == "cpu"

    @property
    def has_fp8(self) -> bool:
        """True unless it is a GPU without 8-bit products, such as an A100."""
        return self.on_cpu or self.peak_flops_fp8 > 0
