"""Training runs that save and resume, small enough for a pool of ranks; ranks import this."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from automoe.checkpoint.store import CheckpointStore
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.data.loader import Loader
from automoe.errors import AutomoeError
from automoe.hf.read import load_hf
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import whole
from tests.support.fault_points import faults

Tensors = dict[str, torch.Tensor]

MODEL = ModelConfig(
    vocab_size=264,
    hidden_size=16,
    num_layers=4,
    first_k_dense=1,
    intermediate_size=24,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=8,
    num_shared_experts=1,
    initializer_range=0.2,
    attention=AttentionConfig(
        kind="mla", num_heads=2, num_kv_heads=2, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6
    ),
    router=RouterConfig(score="sigmoid", num_groups=2, expert_bias=True),
)


def config(text: Path, dtype: str = "float64", keep: int = 2, async_save: bool = False, **mesh: int) -> Config:
    """A run on ``mesh`` over the text file ``text``; all state that a step leaves behind is in play."""
    return Config(
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=MODEL,
        moe=MoEConfig(
            experts="loop" if dtype == "float64" else "grouped_mm",
            seq_balance_coef=0.02,
            global_balance_coef=0.03,
            bias_update_rate=0.02,
        ),
        train=TrainConfig(seq_len=16, global_batch_size=8, micro_batch_size=1, dtype=dtype, val_every=0),
        optim=OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant", ema_decay=0.9),
        data=DataConfig(kind="text", path=str(text), val_fraction=0.0),
        checkpoint=CheckpointConfig(every=1, keep=keep, async_save=async_save),
    )


@dataclass
class Run:
    """What one rank, or after ``merged`` a world, saw of a run.

    Attributes:
        resumed_at: step that the run went on from; None where it found no checkpoint.
        losses: one number a step that this run did.
        states: step -> every tensor of the training state, whole; the first and the last step of the
            run and those that it saved.
        counters: step -> what the state holds besides tensors.
        said: standard output of rank 0.
        notes, warnings: what the store said on this rank.
        in_flight: steps that began while a save was being written.
    """

    resumed_at: int | None = None
    losses: list[float] = field(default_factory=list)
    states: dict[int, Tensors] = field(default_factory=dict)
    counters: dict[int, dict[str, Any]] = field(default_factory=dict)
    said: str = ""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)


def run(pool: RankPool, config: Config, run_dir: Path, until: int, *args: Any, **kwargs: Any) -> Run:
    """Resume what ``run_dir`` holds, or start, and train until step ``until``; arguments as ``run_rank``."""
    runs = run_ranks(pool, config, run_dir, until, *args, **kwargs)
    merged = runs[0]
    for other in runs[1:]:
        for step, tensors in other.states.items():
            merged.states[step] |= tensors
    return merged


def run_ranks(pool: RankPool, config: Config, run_dir: Path, until: int, *args: Any, **kwargs: Any) -> list[Run]:
    """``run`` with what every rank saw."""
    world_size = resolve_mesh(config.mesh, None).world_size
    return pool.run(run_rank, world_size, config, run_dir, until, *args, **kwargs)


def run_rank(
    config: Config,
    run_dir: Path,
    until: int,
    save_at: Collection[int] = (),
    fault: str = "",
    before_step: Callable[[int, CheckpointStore], None] | None = None,
) -> Run:
    """One rank of ``run``.

    Args:
        save_at: steps after which the state is saved.
        fault: in the language of ``fault_points``.
        before_step: called before each step with its number and the store, after the store was polled.
    """
    with faults(fault):
        return _run_rank(config, run_dir, until, save_at, before_step)


def _run_rank(
    config: Config,
    run_dir: Path,
    until: int,
    save_at: Collection[int],
    before_step: Callable[[int, CheckpointStore], None] | None,
) -> Run:
    state, meshes, runner = build_state(config, run_dir)
    store, seen, said = open_store(config, run_dir), Run(), io.StringIO()
    store.attach(seen.notes.append, seen.warnings.append, lambda step_dir: None)
    with contextlib.redirect_stdout(said):
        resumed = store.load_latest(state)
    seen.resumed_at = resumed.step if resumed else None
    first = state.step

    while True:
        check_copies(state)
        if state.step in (first, until, *save_at):
            seen.states[state.step] = {name: whole(tensor) for name, tensor in state.tensors().items()}
            seen.counters[state.step] = state.counters()
        if state.step in save_at and state.step > first:
            store.save(state, None, stopping=False)
        if state.step == until:
            store.poll(wait=True)
            seen.said = said.getvalue()
            return seen
        store.poll()
        if before_step is not None:
            before_step(state.step + 1, store)
        if store.in_flight:
            seen.in_flight.append(state.step + 1)
        inputs, trained = prepare_inputs(state.loader.next_step(), meshes, config, torch.device("cpu"))
        stats = forward_backward(state, runner, inputs, config)
        optimizer_step(state, stats, trained, meshes, config)
        seen.losses.append(stats.loss)


def check_copies(state: TrainState) -> None:
    """Embeddings of several stages of this rank are equal to the bit, and so is what the optimizer keeps of them."""
    held = [part.embedding.weight for part in state.model_parts.values() if part.embedding is not None]
    for copy in held[1:]:
        for name, tensor in state.optimizer.state[copy].items():
            assert torch.equal(whole(tensor), whole(state.optimizer.state[held[0]][name])), name
        assert torch.equal(whole(copy), whole(held[0]))


def build_state(config: Config, run_dir: Path) -> tuple[TrainState, Any, Any]:
    """A run at step 0: (state, meshes, step runner). The token cache lies beside the run directory."""
    meshes = build_meshes(resolve_mesh(config.mesh, None), torch.device("cpu"))
    parts = build_parts(config, meshes)
    if config.model.hf_path is None:
        materialize(parts, config, torch.device("cpu"))
    else:
        allocate(parts, torch.device("cpu"))
        load_hf(parts, config.model.hf_path)
    optimizer = build_optimizer(list(parts.values()), config.optim, ranks=meshes.stage_group())
    loader = Loader(config, meshes.dp_rank, meshes.shape.dp, cache_dir=run_dir.parent / "cache")
    return (TrainState(parts, optimizer, loader), meshes, build_runner(parts, meshes, config, torch.device("cpu")))


def open_store(config: Config, run_dir: Path) -> CheckpointStore:
    """The checkpoints of ``run_dir`` as this rank has them."""
    return CheckpointStore(config, resolve_mesh(config.mesh, None), run_dir)


def refusal(config: Config, run_dir: Path, built: Config | None = None) -> str:
    """What ``load_latest`` of this rank raises, in a run of ``built`` where that is another; empty if it does not."""
    state, _, _ = build_state(built or config, run_dir)
    try:
        open_store(config, run_dir).load_latest(state)
    except AutomoeError as error:
        return str(error)
    return ""


def save_twice(config: Config, run_dir: Path) -> list[dict[str, bytes]]:
    """Save step 0, change every parameter, save step 0 again: the step's files after each."""
    state, _, _ = build_state(config, run_dir)
    store = open_store(config, run_dir)
    files = []
    for _ in range(2):
        step = store.save(state)
        files.append({path.name: path.read_bytes() for path in step.iterdir()})
        with torch.no_grad():
            for parameter in state.parameters():
                parameter.add_(1)
    return files


def on_mesh(config: Config, **mesh: int) -> Config:
    """The same run on another mesh."""
    return replace(config, mesh=MeshConfig(**({"dp_shard": 1} | mesh)))
