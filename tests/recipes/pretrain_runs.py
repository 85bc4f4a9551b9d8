"""The pretraining recipe in a pool of ranks, with faults put into chosen steps; ranks import this."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ObserveConfig,
    OptimConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.errors import AutomoeError
from automoe.parallel.pipeline import build_runner
from automoe.training.context import RunContext
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from recipes import pretrain

MODEL = ModelConfig(
    vocab_size=264,
    hidden_size=16,
    num_layers=2,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=8,
    attention=AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=1, head_dim=8),
    router=RouterConfig(score="sigmoid", expert_bias=True),
)


def config(tmp_path: Path, steps: int, dtype: str = "float32", rows: int = 2, **mesh: int) -> Config:
    """A run of ``steps`` steps in ``tmp_path/run`` over a text of its own, ``rows`` rows a micro-batch."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} squared is {n * n}." for n in range(800)))
    return Config(
        run_dir=str(tmp_path / "run"),
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=MODEL,
        moe=MoEConfig(experts="loop" if dtype == "float64" else "grouped_mm", seq_balance_coef=0.01),
        train=TrainConfig(
            steps=steps,
            seq_len=16,
            global_batch_size=8,
            micro_batch_size=rows,
            dtype=dtype,  # type: ignore[arg-type]
            val_every=steps,
            val_batches=1,
        ),
        optim=OptimConfig(warmup_steps=1),
        data=DataConfig(kind="text", path=str(text), val_fraction=0.1),
        checkpoint=CheckpointConfig(export_hf=False),
        observe=ObserveConfig(report=False),
    )


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        parameters: this rank's, whole, before each step.
        said: what it printed.
        error: message of the error for the user that ended the run.
        preempted: whether it said that it left before its end.
    """

    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)
    said: str = ""
    error: str = ""
    preempted: bool = False


def run(
    pool: RankPool, config: Config, fault: str = "", at: tuple[int, ...] = (), stop: bool = False
) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Run the recipe, asked to stop in its first step if ``stop``; every rank's outcome, and ``metrics.jsonl``."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(exist_ok=True)  # a run that goes on is in the directory of the first
    world_size = resolve_mesh(config.mesh, None).world_size
    outcomes = pool.run(run_rank, world_size, config, fault, at, stop)
    return outcomes, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def run_rank(config: Config, fault: str, at: tuple[int, ...], stop: bool) -> Outcome:
    """One rank of ``run``; ``fault`` strikes on the last rank in the steps ``at``, counted from 1."""
    run_dir, outcome = Path(config.run_dir), Outcome()

    def faulty_runner(*args: Any) -> FaultyRunner:
        return FaultyRunner(args, fault, at, outcome)

    context = RunContext(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"), run_dir)
    if stop:
        context.stop.set()
    log = run_dir / f"said{context.rank}"
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(run_dir.parent)),
        mock.patch.object(pretrain, "build_runner", faulty_runner),
        log.open("w") as file,
        contextlib.redirect_stdout(file),
    ):
        try:
            pretrain.main(config, resolve_mesh(config.mesh, None), context)
        except AutomoeError as error:
            outcome.error = str(error)
    outcome.said, outcome.preempted = log.read_text(), context.preempted
    return outcome


class FaultyRunner:
    """The recipe's step runner, which keeps parameters and lets a fault strike on the last rank."""

    def __init__(self, args: Any, fault: str, at: tuple[int, ...], outcome: Outcome) -> None:
        self.runner, self.parts = build_runner(*args), args[0]
        self.fault, self.at, self.outcome = fault, at, outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def train(self, inputs: Any) -> torch.Tensor:
        kept = self.outcome.parameters
        kept.append({name: whole(parameter) for name, parameter in named_parameters(self.parts).items()})
        struck = len(kept) in self.at and dist.get_rank() == dist.get_world_size() - 1
        with FAULTS[self.fault](self.parts) if struck else contextlib.nullcontext():
            return self.runner.train(inputs)


@contextlib.contextmanager
def nan_activation(parts: Any) -> Iterator[None]:
    """The last norm's output is not a number: neither is the loss, nor any gradient before it."""
    part = max(parts.items())[1]
    handle = part.norm.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    yield
    handle.remove()


@contextlib.contextmanager
def infinite_expert_gradient(parts: Any) -> Iterator[None]:
    """One element of one expert's gradient overflows; the loss is finite."""
    yield
    weight = max(parts.items())[1].layers["1"].mlp.experts.down_proj
    weight.grad.to_local()[0, 0, 0] = float("inf")


@contextlib.contextmanager
def loss_spike(parts: Any) -> Iterator[None]:
    """The last norm's output is far too large: so is the loss, and everything is finite."""
    part = max(parts.items())[1]
    handle = part.norm.register_forward_hook(lambda module, inputs, output: output * 100)
    yield
    handle.remove()


NOT_FINITE: dict[str, Callable[[Any], Any]] = {
    "nan activation": nan_activation,
    "infinite expert gradient": infinite_expert_gradient,
}
FAULTS = NOT_FINITE | {"loss spike": loss_spike}
