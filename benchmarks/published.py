"""Published training runs beside what automoe predicts for them: ``published_runs.toml``, read and compared."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from automoe.config.compose import compose_config
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.observe.flops import train_flops_per_token
from automoe.planner.machine import Constants
from automoe.planner.time import StepTime, step_time

RUNS = Path(__file__).parent / "published_runs.toml"
APART = 1.10  # runs closer than this are not ordered


@dataclass(frozen=True)
class Run:
    """One published run: what it was, as a configuration here, and its tokens per second and GPU."""

    name: str
    source: str
    model: str
    fit: bool
    config: Config
    mesh: MeshShape
    overlap: bool
    gradient_bytes: int  # of a number that FSDP reduces; 0: as automoe does
    tokens_per_second: float

    def predict(self, constants: Constants | None = None) -> StepTime:
        return step_time(
            self.config,
            self.mesh,
            constants=constants,
            overlap=self.overlap,
            fused=self.source != "A",
            gradient_bytes=self.gradient_bytes,
        )

    def error(self, constants: Constants | None = None) -> float:
        """Predicted over published tokens per second, less one."""
        return self.predict(constants).tokens_per_second / self.mesh.world_size / self.tokens_per_second - 1


@lru_cache(maxsize=32)
def _base(model: str, cluster: str) -> Config:
    config = compose_config("mixtral_8x22b", [f"model={model}", f"cluster={cluster}", "mesh=fsdp"])
    config.mesh = MeshConfig()
    return config


def configured(model: str, settings: dict[str, Any], gpus: int) -> tuple[Config, MeshShape]:
    """A configuration with these keys on so many GPUs. It need not be one that automoe can run."""
    config = deepcopy(_base(model, settings["cluster"]))
    for key, value in settings.items():
        *parents, last = key.split(".")
        target = config
        for name in parents:
            target = getattr(target, name)
        if parents:
            setattr(target, last, value)
    if config.parallel.stages_per_rank > 1 and config.parallel.schedule == "1F1B":
        config.parallel.schedule = "Interleaved1F1B"
    config.moe.capacity_factor = config.moe.capacity_factor or 0.0
    return config, resolve_mesh(config.mesh, gpus)


@lru_cache(maxsize=1)
def runs() -> list[Run]:
    """All of ``published_runs.toml``."""
    table = tomllib.loads(RUNS.read_text())
    found = []
    for row in table["run"]:
        config, mesh = configured(row["model"], table["defaults"] | row["set"], row["gpus"])
        config.model.num_mtp_layers = row.get("num_mtp", 0)
        flops = train_flops_per_token(config.model, config.train.seq_len)
        per_token = flops.full_attention if row.get("flops") == "full" else flops.causal
        flops_per_second = row["mfu"] * config.cluster.peak_flops if "mfu" in row else 1e12 * row.get("tflops", 0)
        speed = row.get("tokens") or flops_per_second / per_token
        overlap = row.get("overlap", False)
        found.append(
            Run(
                row["name"],
                row["source"],
                row["model"],
                row.get("fit", True),
                config,
                mesh,
                overlap,
                row.get("gradient_bytes", 0),
                speed,
            )
        )
    return found


def parted() -> tuple[list[Run], list[Run], list[Run]]:
    """Runs that the constants are fitted to, others on such GPUs, and those on GPUs whose products were not measured."""
    known = [run for run in runs() if run.config.cluster.gemm_curve]
    rest = [run for run in runs() if not run.config.cluster.gemm_curve]
    return [run for run in known if run.fit], [run for run in known if not run.fit], rest


def mean_error(chosen: Sequence[Run], constants: Constants | None = None) -> float:
    """Mean absolute relative error of tokens per second."""
    return fmean(abs(run.error(constants)) for run in chosen)


def ordered(chosen: Sequence[Run], constants: Constants | None = None) -> tuple[int, int]:
    """(pairs ordered rightly, pairs) of the runs of one model that are more than 10% apart in tokens per second."""
    predicted = {id(run): run.predict(constants).tokens_per_second / run.mesh.world_size for run in chosen}
    pairs = [
        (a, b)
        for a, b in combinations(chosen, 2)
        if a.model == b.model
        and max(a.tokens_per_second, b.tokens_per_second) > APART * min(a.tokens_per_second, b.tokens_per_second)
    ]
    right = sum((predicted[id(a)] > predicted[id(b)]) == (a.tokens_per_second > b.tokens_per_second) for a, b in pairs)
    return right, len(pairs)


def winners(chosen: Sequence[Run], constants: Constants | None = None) -> dict[str, bool]:
    """By model with several runs: whether the fastest published is the fastest predicted."""
    found = {}
    for model in sorted({run.model for run in chosen}):
        mine = [run for run in chosen if run.model == model]
        if len(mine) > 1:
            best = max(mine, key=lambda run: run.tokens_per_second)
            guess = max(mine, key=lambda run: run.predict(constants).tokens_per_second / run.mesh.world_size)
            found[model] = best is guess
    return found
