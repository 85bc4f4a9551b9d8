"""The order of a training step: that it is what it must be, and that no other file spells it out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.config.train_schema import Phase
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training import step
from automoe.training.state import TrainState
from tests.support.gpu import one_rank

ROOT = Path(__file__).parents[2]
# Called by the step alone. Peers of a benchmark step their own optimizers.
OF_THE_STEP = {
    "gather_stats",
    "global_grad_norm",
    "reason_to_skip",
    "update_scales",
    "clip_",
    "set_learning_rate",
    "update_balance_state",
    "remember_loss",
    "update_averages",
    "take_largest_logits",
    "clip_logits",
}
CONFIG = Config(
    mesh=MeshConfig(dp_shard=1),
    model=ModelConfig(
        vocab_size=32,
        hidden_size=16,
        num_layers=1,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        attention=AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=1, head_dim=8),
        router=RouterConfig(score="sigmoid", expert_bias=True),
    ),
    train=TrainConfig(seq_len=8, global_batch_size=2, micro_batch_size=1, steps=10, spike_factor=6.0),
    optim=OptimConfig(ema_decay=0.9),
)


def calls(source: str) -> Iterator[tuple[str, int]]:
    """(name, line) of every call of what belongs to the step."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.split(".")[-1] in OF_THE_STEP or name.endswith("optimizer.step"):
                yield name, node.lineno


def test_the_order_of_a_step_is_spelled_out_in_one_place() -> None:
    elsewhere = []
    for path in (path for room in ("automoe", "recipes", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        if name != "automoe/training/step.py":
            found = list(calls(path.read_text()))
            if name in ("benchmarks/contenders.py", "benchmarks/peer_steps.py"):  # steps of other makers' models
                found = [call for call in found if not call[0].endswith("optimizer.step")]
            elsewhere += [f"{name}:{line} calls {call}" for call, line in found]
    assert elsewhere == []
    inside = {name.split(".")[-1] for name, _ in calls((ROOT / "automoe/training/step.py").read_text())}
    assert inside == OF_THE_STEP | {"step"}


def test_a_call_elsewhere_is_found() -> None:
    source = "norm = grad_norm.global_grad_norm(ps)\nclip_(ps, norm, 1.0)\nself.optimizer.step()\nscheduler.step()"
    assert [name for name, _ in calls(source)] == ["grad_norm.global_grad_norm", "clip_", "self.optimizer.step"]


def order_of(loss: float | None, config: Config = CONFIG) -> tuple[list[str], TrainState, step.Update]:
    """What one step calls, in order; with ``loss`` in place of the loss that it had."""
    called: list[str] = []

    def listed(name: str, original):
        def call(*args, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        return call

    tokens = torch.arange(16).view(2, 8)
    batch = StepBatch(tokens, tokens, torch.arange(8).expand(2, 8), torch.zeros(2, 8, dtype=torch.int64), 0, 0)
    with one_rank("cpu") as device, ExitStack() as stack:
        meshes = build_meshes(resolve_mesh(config.mesh, 1), device)
        parts = build_parts(config, meshes)
        materialize(parts, config, device)
        state = TrainState(parts, build_optimizer(parts.values(), config.optim))
        for name in OF_THE_STEP:
            stack.enter_context(mock.patch.object(step, name, listed(name, getattr(step, name))))
        for name in ("step", "zero_grad"):
            bound = listed(name, getattr(state.optimizer, name))
            stack.enter_context(mock.patch.object(state.optimizer, name, bound))
        inputs, trained = step.prepare_inputs(batch, meshes, config, device)
        stats = step.forward_backward(state, build_runner(parts, meshes, config, device), inputs, config)
        assert all(parameter.grad is not None for parameter in state.parameters())
        if loss is not None:
            stats.loss = loss
        update = step.optimizer_step(state, stats, trained, meshes, config, {"skip": 3.0})
        assert update.over_ranks["skip"] == 3.0, "the user's, whatever the step's own numbers are called"
        assert all(parameter.grad is None for parameter in state.parameters())
    return called, state, update


def test_a_step_that_is_taken() -> None:
    called, state, update = order_of(None)
    assert called == [
        "gather_stats",
        "global_grad_norm",
        "reason_to_skip",
        "update_scales",
        "clip_",
        "set_learning_rate",
        "step",
        "update_averages",
        "update_balance_state",
        "remember_loss",
        "zero_grad",
    ]
    assert (state.step, state.tokens, state.skipped, len(state.recent_losses)) == (1, 16, 0, 1)
    assert not update.skipped and update.skip_reason is None and update.grad_norm > 0
    assert update.lr == CONFIG.optim.lr / CONFIG.optim.warmup_steps


def test_a_step_that_is_skipped_still_counts() -> None:
    called, state, update = order_of(float("nan"))
    assert called == ["gather_stats", "global_grad_norm", "reason_to_skip", "update_scales", "zero_grad"]
    assert (state.step, state.tokens, state.skipped, state.recent_losses) == (1, 16, 1, [])
    assert update.skipped and update.skip_reason is not None and "loss nan" in update.skip_reason


@pytest.mark.parametrize("rate", [None, 0.0, 0.5])
def test_a_step_has_the_rates_of_its_phase(rate: float | None) -> None:
    optim = OptimConfig(schedule="phases", warmup_steps=0, phases=[Phase(10, 0.5, bias_update_rate=rate)])
    _, state, update = order_of(None, replace(CONFIG, optim=optim))
    assert update.lr == optim.lr / 2
    [bias] = [one for part in state.model_parts.values() for name, one in part.named_buffers() if "expert_bias" in name]
    assert bias.abs().max() == (CONFIG.moe.bias_update_rate if rate is None else rate)


@pytest.mark.parametrize("weight", [None, 0.0])
def test_a_step_weighs_modules_as_its_phase_says(weight: float | None) -> None:
    optim = OptimConfig(schedule="phases", warmup_steps=0, phases=[Phase(10, mtp_loss_weight=weight)])
    config = replace(CONFIG, model=replace(CONFIG.model, num_mtp_layers=1), optim=optim)
    _, state, _ = order_of(None, config)
    [module] = [
        one for part in state.model_parts.values() for name, one in part.named_parameters() if "eh_proj" in name
    ]
    assert bool(state.optimizer.state[module]["exp_avg"].any()) == (weight is None)
